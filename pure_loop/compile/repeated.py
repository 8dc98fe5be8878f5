"""Code that a graph calls as one operation: a function that is compiled once and called many times, or a kernel.

A recurrent layer takes the same steps over and over. Written out they are thousands of operations, on which a compiler
takes minutes. So a few of them are traced apart, together with their backward, and compiled; the graph around them has
an operation that calls this code, of which torch's compiler knows the shapes of what it gives and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule

from pure_loop._autograd import GradMode
from pure_loop.compile.connected import choosing, halved
from pure_loop.compile.private import private_to_torch
from pure_loop.compile.writing import drop_unused

with private_to_torch():
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
    from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Maker", "Repeated"]

_library: Any = torch.library.Library("pure_loop", "FRAGMENT")  # type: ignore[no-untyped-call]
# `like` says what it gives, so that torch's cache of graphs takes none for another one.
_library.define("call(Tensor[] given, int code, str like) -> Tensor[]")
_CALL: Any = torch.ops.pure_loop.call.default

Code = Callable[[list[Tensor]], Sequence[Tensor]]
# (graph) -> the same as a compiler takes it; (graph, whether it is a backward's) -> machine code
Functional = Callable[[GraphModule], GraphModule]
Lower = Callable[[GraphModule, bool], Code]


@attrs.define(eq=False)
class _Half:
    """What a graph calls.

    Attributes:
        like: tensors without numbers, like those that it gives, but contiguous.
        call: takes a list of tensors, and empties it; None, until it is compiled.
        graph: what is compiled.
        number: by which it is called.
    """

    like: list[Tensor]
    call: Code | None = None
    graph: GraphModule | None = None
    number: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # The lowest that is free: a graph that is compiled again is found in torch's cache then.
        self.number = next(number for number in itertools.count() if number not in _halves)
        _halves[self.number] = self

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        like = ", ".join(f"{tuple(each.shape)} {each.dtype} {each.device}" for each in self.like)
        return _CALL(list(given), self.number, like)  # type: ignore[no-any-return]

    def compile(self, lower: Lower, *, backward: bool) -> None:
        if self.call is None:
            assert self.graph is not None
            self.call, self.graph = choosing(lower(self.graph, backward), self.graph.meta["places"]), None


# Held by what is compiled with them.
_halves: WeakValueDictionary[int, _Half] = WeakValueDictionary()


def _call(given: list[Tensor], code: int, like: str) -> list[Tensor]:
    call = _halves[code].call
    assert call is not None
    found = call([tensor.contiguous() for tensor in given])
    # What an operation gives has memory of its own, or else who calls it might write there.
    known = {tensor.untyped_storage()._cdata for tensor in given}
    results = []
    for tensor in found:
        result = tensor.contiguous()
        if result.untyped_storage()._cdata in known:
            result = result.clone()
        known.add(result.untyped_storage()._cdata)
        results.append(result)
    return results


def _like(given: list[Tensor], code: int, like: str) -> list[Tensor]:
    return [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in _halves[code].like]


_library.impl("call", _call, "CompositeExplicitAutograd")
torch.library.register_fake("pure_loop::call", _like, lib=_library)


@attrs.frozen(eq=False)
class Repeated:
    """A function of tensors, and its backward.

    Attributes:
        forward: gives the results, and more that is kept for the backward.
        backward: takes what is kept, and the gradients by the results; None: nothing has one.
        results: how many there are.
        written_out: the function itself, for a second derivative, which machine code has not.
        inputs: for each input, which gradient of the backward's is its own; None where there is none.
        kept: which inputs are kept.
        kept_from: from which on what the forward gives is kept, after these.
    """

    forward: _Half
    backward: _Half | None
    results: int
    written_out: Callable[..., Sequence[Tensor]]
    inputs: tuple[int | None, ...] = ()
    kept: tuple[int, ...] = ()
    kept_from: int = 0

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        if self.backward is None:
            return tuple(self.forward(given)[: self.results])
        return _Function.apply(self, *given)  # type: ignore[no-any-return, no-untyped-call]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code: Repeated, *given: Tensor) -> tuple[Tensor, ...]:
        found = code.forward(given)
        ctx.code, ctx.cast = code, _cast(given)
        ctx.save_for_backward(*given, *found[code.kept_from :])
        return tuple(found[: code.results])

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        code, saved = ctx.code, ctx.saved_tensors  # which gives them once
        given, computed = saved[: len(code.inputs)], saved[len(code.inputs) :]
        if torch.is_grad_enabled():
            return None, *_differentiable(code.written_out, given, ctx.needs_input_grad[1:], tangents, ctx.cast)
        found = code.backward([*[given[i] for i in code.kept], *computed, *tangents])
        return None, *[None if place is None else found[place] for place in code.inputs]


def _differentiable(
    function: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    wanted: Sequence[bool],
    tangents: Sequence[Tensor],
    cast: torch.dtype | None,
) -> Iterator[Tensor | None]:
    """The gradients by those inputs that are wanted, with a graph of their own; None for the others."""
    # One may be another one, or come of it: each gradient is by this place alone.
    apart = [each.view_as(each) for each in given]
    with torch.autocast(given[0].device.type, dtype=cast, enabled=cast is not None):
        found = function(*apart)
    sources = [each for each, is_wanted in zip(apart, wanted, strict=True) if is_wanted]
    gradients = iter(torch.autograd.grad(found, sources, tangents, create_graph=True, allow_unused=True))
    return (next(gradients) if is_wanted else None for is_wanted in wanted)


class Maker:
    """What is traced apart in one trace: each function once for inputs of a kind.

    Args:
        mode: of tensors without numbers.
        functional: makes a graph functional.
    """

    def __init__(self, mode: Any, functional: Functional) -> None:
        self._mode = mode
        self._functional = functional
        self._made: dict[Any, Repeated] = {}

    def traced(self, key: Any, function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> Repeated:
        """A function of tensors, for tensors like these; ``key`` tells it from others."""
        wanted = _wanted(given)
        places = [place for place, each in enumerate(wanted) if each]

        def make() -> Repeated:
            fakes = list(map(self._like, given))
            with self._mode, GradMode(False):
                results = list(map(self._like, function(*fakes)))
            if not places:
                forward = self._half(self._graph(function, fakes), range(len(given)))
                return Repeated(forward, None, len(results), function)
            whole = self._graph(_with_gradients(function, len(given), places), [*fakes, *results])
            first, second, kept, order = halved(whole, len(given), len(results))
            order += [f"tangents_{i}" for i in range(len(results))]
            inputs = [node for node in second.graph.nodes if node.op == "placeholder"]
            for node in inputs:
                node.meta["val"] = self._like(node.meta["val"])
            return Repeated(
                self._half(first, range(len(given))),
                self._half(second, [order.index(node.name) for node in inputs]),
                len(results),
                function,
                inputs=tuple(places.index(place) if place in places else None for place in range(len(given))),
                kept=tuple(kept),
                kept_from=len(results),
            )

        return self._of((key, *_kinds(given), *wanted), make)

    def kernel(
        self,
        key: Any,
        forward: Code,
        backward: Code,
        written_out: Callable[..., Sequence[Tensor]],
        given: Sequence[Tensor],
        results: int,
    ) -> Repeated:
        """A kernel of torch's, for tensors like these.

        Args:
            key: tells it from others.
            forward: gives the results, and more that its backward takes.
            backward: takes the inputs, what the forward gives, and the gradients by the results; gives one by each
                input.
            written_out: gives the same results in operations that are differentiated.
            given: like what it is called with.
            results: how many there are.
        """
        wanted = any(_wanted(given))

        def make() -> Repeated:
            with _disable_current_modes():  # what it gives besides the results is known to itself alone
                found = forward([torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in given])
            places = tuple(range(len(given)))
            return Repeated(
                _Half(list(map(self._like, found)), forward),
                _Half(list(map(self._like, given)), backward) if wanted else None,
                results,
                written_out,
                inputs=places,
                kept=places,
            )

        return self._of((key, *_kinds(given), wanted), make)

    def compile(self, lower: Lower) -> list[Repeated]:
        """Compile what was traced; what it gives has to be held for as long as it may be called."""
        for repeated in self._made.values():
            repeated.forward.compile(lower, backward=False)
            if repeated.backward is not None:
                repeated.backward.compile(lower, backward=True)
        return list(self._made.values())

    def _of(self, key: Any, make: Callable[[], Repeated]) -> Repeated:
        if key not in self._made:
            # What is saved for a backward of this trace is no matter of who counts what is saved.
            with disable_proxy_modes_tracing(), saved_tensors_hooks(_itself, _itself):
                self._made[key] = make()
        return self._made[key]

    def _graph(self, function: Callable[..., Sequence[Tensor]], fakes: list[Tensor]) -> GraphModule:
        return self._functional(make_fx(lambda *given: list(function(*given)))(*fakes))

    def _half(self, graph: GraphModule, places: Sequence[int]) -> _Half:
        """A graph whose inputs are at these places of what it will be given."""
        taken = [places[i] for i in drop_unused(graph)]
        graph.recompile()
        outputs: Any = next(iter(reversed(graph.graph.nodes))).args[0]
        graph.meta["places"] = taken
        return _Half([self._like(node.meta["val"]) for node in outputs], graph=graph)

    def _like(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _wanted(given: Sequence[Tensor]) -> list[bool]:
    """Of which a gradient is wanted."""
    return [torch.is_grad_enabled() and each.requires_grad for each in given]


def _cast(given: Sequence[Tensor]) -> torch.dtype | None:
    """What autocast makes of their products; None where it is off."""
    device = given[0].device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _kinds(given: Sequence[Tensor]) -> tuple[Any, ...]:
    return _cast(given), *[(tuple(each.shape), each.dtype, each.device) for each in given]


def _with_gradients(
    function: Callable[..., Sequence[Tensor]], count: int, places: list[int]
) -> Callable[..., list[Tensor]]:
    """The function, of its inputs and the gradients by its results; gives the results, and the gradients by inputs."""

    def joint(*given: Tensor) -> list[Tensor]:
        leaves, tangents = list(given[:count]), list(given[count:])
        for place in places:
            leaves[place] = leaves[place].detach().requires_grad_()
        with GradMode(True):
            found = function(*leaves)
        with torch.autograd.set_multithreading_enabled(False), torch.autocast(leaves[0].device.type, enabled=False):
            gradients = torch.autograd.grad(found, [leaves[place] for place in places], tangents)
        return [*[each.detach() for each in found], *gradients]

    return joint
