"""Laws about single calls: an algorithm's functions change nothing but what they return, and keep its structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.algorithm import Algorithm, bind
from pure_loop.event import Event
from pure_loop.hooks import Handler, HandlerFunction
from pure_loop.order import BOUNDARIES
from pure_loop.random.authors import is_users
from pure_loop.random.guards import guard
from pure_loop.state import NOT_READY, State
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import Difference, Keeper, Snapshot, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import run_until_error
from pure_loop.testing.report import LawViolation, moment, written_to
from pure_loop.testing.subject import AlgorithmSubject, Subject

__all__ = ["Call", "Tap", "memory", "purity", "structure", "tapped"]


@attrs.frozen
class Call:
    """One call of a function of an algorithm.

    Attributes:
        kind: ``"handler"``, ``"when"`` or ``"init"``.
        algorithm: its name.
        position: of the algorithm in the list.
        event: the event of the State.
        index: of the handler among those of the event.
        state: the first argument.
        rest: further arguments: the stages, or nothing.
        function: the function itself.
    """

    kind: str
    algorithm: str
    position: int
    event: Event
    index: int
    state: State
    rest: tuple[object, ...]
    function: Callable[..., object]

    def __call__(self) -> object:
        """Call the function as the loop would."""
        return self._drawing(self.function)

    def _drawing(self, function: Callable[..., object]) -> object:
        """Call it with the global generators seeded, as the loop does for code of the user's."""
        path = (self.kind, self.algorithm, self.index)
        with guard(self.state.replace(event=self.event), path) if is_users(function) else nullcontext():
            return function(self.state, *self.rest)

    def of(self, fresh: Sequence[Algorithm]) -> object:
        """Call the same function of other instances."""
        algorithm = fresh[self.position]
        if self.kind == "handler":
            return self._drawing(algorithm.handlers[self.event][self.index])
        function = algorithm.init if self.kind == "init" else algorithm.when
        assert function is not None
        return self._drawing(function)

    @property
    def name(self) -> str:
        """The name of the function in messages."""
        part = {"handler": "", "when": "the predicate `when` of ", "init": "`init` of "}[self.kind]
        return f"{part}algorithm {self.algorithm!r}"

    @property
    def where(self) -> str:
        """The name of the moment in messages."""
        return moment(self.state)


Tap = Callable[[Call], object]


def tapped(subject: Subject, algorithms: Sequence[Algorithm], tap: Tap) -> tuple[Algorithm, ...]:
    """The algorithms, with ``tap`` called instead of each of their functions; it returns what the function would."""
    subject.watched = True
    return tuple(_tapped(subject, algorithm, position, tap) for position, algorithm in enumerate(algorithms))


def _tapped(subject: Subject, algorithm: Algorithm, position: int, tap: Tap) -> Algorithm:
    name = algorithm.name

    def around(
        kind: str, function: Callable[..., object], event: Event | None = None, index: int = 0
    ) -> Callable[..., Any]:
        def call(state: State, *rest: object) -> Any:
            if kind == "init" and any(tensor.is_meta for tensor in state.params.values()):
                return function(state, *rest)  # the loop reads shapes from it, and no State receives it
            at = event if event is not None else state.event or Event.INIT
            if kind == "handler":
                subject.fired[name, at] += 1
            return tap(Call(kind, name, position, at, index, state, rest, function))

        return call

    def handler(bound: Handler, event: Event, index: int) -> HandlerFunction:
        call = around("handler", bound.function, event, index)
        # The loop reads from the signature whether the handler takes the stages.
        return (lambda state, stages: call(state, stages)) if bound.takes_stages else (lambda state: call(state))

    handlers = {
        event: [handler(bound, event, index) for index, bound in enumerate(listed)]
        for event, listed in bind([algorithm]).items()
    }
    init = None if algorithm.init is None else around("init", algorithm.init)
    when = None if algorithm.when is None else around("when", algorithm.when)
    return Algorithm(
        name,
        handlers,
        None if init is None else lambda state: init(state),
        when=None if when is None else lambda state: when(state),
    )


@law("an algorithm is a function of the State alone, and changes nothing but what it returns")
def purity(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Calls each function twice, on fresh instances and under different global random states, and compares.

    After each call, the State that was passed and the settings of the process must be as they were before it.
    """
    keeper = Keeper()
    module = case.model()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def tap(call: Call) -> object:
        snapshot = Snapshot(call.state)
        keeper.keep(call.state)
        results = []
        for seed in (11, 12):
            with reseeded(seed):
                around = Surroundings()
                try:
                    results.append(call.of(subject.make()))
                except LawViolation:
                    raise
                except Exception:  # an error of the function on trial; the call below raises it in the run itself
                    break  # if that one doesn't raise, the instance has a state of its own: the law `memory` reports it
                _left_alone(call, around)
            _not_written(call, snapshot)
        if len(results) == 2:
            _equal(call, *results)
        around = Surroundings()
        result = call()
        _left_alone(call, around)
        _not_written(call, snapshot)
        if isinstance(result, State):
            keeper.keep(result)
        return result

    run_until_error(subject, case, fit, start=module, algorithms=tapped(subject, subject.make(), tap))
    changed = keeper.changed()
    if changed is not None:
        state, difference = changed
        raise written_to(
            f"a State that {subject.name} had at {moment(state)}, was written to later: something kept a reference to "
            "one of its tensors, and wrote to it in place.",
            state.event,
            difference,
        )
    for name, tensor in module.named_parameters():
        if tensor.grad is not None:
            raise LawViolation(f"the user's module has a gradient after the run, in {name}.grad.")
    for name, tensor in module.state_dict().items():
        for _ in differences(tensor, before[name]):
            raise LawViolation(f"the user's module was written to: {name} has changed.")


def _not_written(call: Call, snapshot: Snapshot) -> None:
    changed = snapshot.changed()
    if changed is None:
        return
    if changed.leaf.endswith(".grad"):
        raise written_to(
            f"{call.name} left a gradient in a tensor of the State that was passed to it, at {call.where}.",
            call.event,
            changed,
            "loss.backward() writes to .grad. Use torch.autograd.grad(loss, tensors), which writes to nothing, or "
            "stages.gradients(state), which is the loop's own gradient.",
        )
    raise written_to(
        f"{call.name} wrote in place to a leaf of the State that was passed to it, at {call.where}.",
        call.event,
        changed,
    )


def _left_alone(call: Call, around: Surroundings) -> None:
    changed = around.changed()
    if changed is None:
        return
    advice = ""
    if "generator" in changed:
        advice = "Draw from a generator of your own: pl.random.generator(state.seed, 'name', state.timestamp.batch)."
    raise LawViolation(f"{call.name} changed {changed} at {call.where}.", event=call.event, advice=advice)


def _equal(call: Call, first: object, second: object) -> None:
    if type(first) is not type(second):
        raise LawViolation(
            f"{call.name} returned {first!r} at {call.where}, and {second!r} when it was called again with the same "
            "State.",
            event=call.event,
        )
    name = "state" if isinstance(first, State) else "result"
    for difference in differences(_readable(first), _readable(second), name=name):
        raise LawViolation(
            f"{call.name} returned two different results for the same State at {call.where}. Between the calls the "
            "global random generators were reseeded and time passed; the result must depend on neither.",
            event=call.event,
            difference=difference,
            labels=("first call", "second call"),
            advice="Draw from pl.random.generator(state.seed, 'name', state.timestamp.batch), and take the time from "
            "state.timestamp.",
        )


def _readable(result: object) -> object:
    """A State with gradients that can be compared: during a call, a marker stands for those that are not complete."""
    if isinstance(result, State) and result._grads is NOT_READY:
        return result.replace(grads=None)
    return result


@law(
    "an algorithm keeps all its state in the State: a fresh instance continues exactly where another one stopped",
    rests_on=("purity",),
)
def memory(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """At every call, the instance that was called at all events before returns what a fresh one returns."""

    def tap(call: Call) -> object:
        result = call()
        try:
            fresh = call.of(subject.make())
        except LawViolation:
            raise
        except Exception as error:
            raise LawViolation(
                f"a fresh instance of {call.name} raised {type(error).__name__}: {error} at {call.where}; the instance "
                "that had been called at the events before did not. It keeps a state of its own, outside the State.",
                event=call.event,
                advice=_KEEP.format(name=call.algorithm),
            ) from error
        if call.kind == "init":
            return result
        if type(result) is type(fresh):
            different = differences(_readable(result), _readable(fresh), name="state")
        else:
            different = [Difference("the result", result, fresh)]
        for difference in different:
            raise LawViolation(
                f"{call.name}, called at all events before, returned something else at {call.where} than a fresh "
                "instance. It keeps a state of its own, outside the State.",
                event=call.event,
                difference=difference,
                labels=("this instance", "a fresh one"),
                advice=_KEEP.format(name=call.algorithm),
            )
        return result

    run_until_error(subject, case, fit, algorithms=tapped(subject, subject.make(), tap))


_KEEP = (
    "A closure, a global or an attribute is lost when training resumes. Keep it in the State: init=lambda state: 0 "
    "makes it, state.algorithm_state['{name}'] reads it, state.remember('{name}', value) writes it."
)

_OF_TENSORS = ("params", "buffers", "grads")


@law("trees, shapes, dtypes and devices stay as they are, also in algorithm_state")
def structure(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Compares the State that each handler returns with the one it got, and algorithm_state from batch to batch."""

    def tap(call: Call) -> object:
        result = call()
        if call.kind != "handler":
            return result
        if not isinstance(result, State):
            raise LawViolation(
                f"{call.name} returned {result!r} at {call.where}, not a State.",
                event=call.event,
                advice="End it with `return state.replace(...)`, or `return state` where nothing changes.",
            )
        if result.model is call.state.model:
            for field in (*_OF_TENSORS, "opt_state"):
                name = "_grads" if field == "grads" else field
                before, after = getattr(call.state, name), getattr(result, name)
                if after is not before and before is not None and after is not None and before is not NOT_READY:
                    what = f"{call.name} changed the structure of state.{field}"
                    _same_kind(what, call.state, before, after, f"state.{field}", nones=field == "grads")
        return result

    pairs = run_until_error(subject, case, fit, algorithms=tapped(subject, subject.make(), tap))
    first: dict[str, object] = {}
    # Within a batch an algorithm may hold values that it puts back at the end of a pair; at a boundary it holds none.
    for event, state in pairs:
        if event in BOUNDARIES:
            for name in subject.names:
                if name in state.algorithm_state:
                    value = state.algorithm_state[name]
                    _refuse_graph(name, state, value)
                    _same_kind(
                        f"the state of algorithm {name!r} changed its structure",
                        state,
                        first.setdefault(name, value),
                        value,
                        f"state.algorithm_state[{name!r}]",
                    )


def _refuse_graph(name: str, state: State, value: PyTree) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(value, namespace=NAMESPACE)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            where = f"state.algorithm_state[{name!r}]" + "".join(f"[{key!r}]" for key in path)
            raise LawViolation(
                f"the state of algorithm {name!r} holds the autograd graph of a forward at {moment(state)}, in "
                f"{where}; the graph keeps its batch in memory, and grows with every batch.",
                event=state.event,
                advice="Store detached tensors: state.loss.detach().",
            )


def _same_kind(what: str, state: State, before: object, after: object, name: str, *, nones: bool = False) -> None:
    if before is after:
        return
    kinds_before, kinds_after = _kinds(before), _kinds(after)
    for path in dict.fromkeys([*kinds_before, *kinds_after]):
        a, b = kinds_before.get(path, "nothing"), kinds_after.get(path, "nothing")
        if a == b or (nones and "None" in (a, b)):
            continue
        where = name + "".join(f"[{key!r}]" for key in path)
        raise LawViolation(
            f"{what} at {moment(state)}: {where} was {a}, and is {b}.",
            event=state.event,
            advice="Names, shapes, dtypes and devices must stay as they are, so that training can resume from any "
            "State. For a list that grows, allocate its full size at the start and count the entries in use.",
        )


def _kinds(tree: PyTree) -> dict[tuple[object, ...], str]:
    """Shape, dtype and device of each tensor of a tree, and the type of each other leaf, by path."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE, none_is_leaf=True)
    return dict(zip(paths, map(_kind, leaves), strict=True))


def _kind(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return "None" if leaf is None else type(leaf).__name__
