"""What a graph can't hold is refused with what to write, or runs eagerly; other errors are those of eager steps."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CompileError
from pure_loop.random.seeds import derive, generator, seeded
from tests.support import problem
from tests.support.compiling import BATCHES, EPOCHS, FIVE, INSIDE, NAMED, WITH_NAN, Named, fit, net, same
from tests.support.problem import cross_entropy
from tests.support.refused import Refusal, check

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


PLAIN: dict[str, Any] = {"model": problem.mlp, "data": FIVE[:2], "max_duration": "2ba", "watch": BATCHES}
FORWARD, BEFORE_LOSS, LOSS = ({event, *BATCHES} for event in INSIDE[:3])


def doing(event: Event, name: str, function: Callable[[pl.State], pl.State], **options: Any) -> dict[str, Any]:
    at_the_end = {"watch": EPOCHS} if event is Event.BATCH_END else {}  # else it runs eagerly
    return {"algorithms": [pl.Algorithm(name, {event: function}, **options)]} | at_the_end


def if_large(state: pl.State) -> pl.State:
    if state.loss > 0.5:
        return state.replace(grads={name: grad / 2 for name, grad in state.grads.items()})
    return state


def reads(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.one(x)
    return out if out.abs().max().item() < 100 else out.clamp(-100, 100)


def halved_memory(state: pl.State) -> pl.State:
    return state.remember("np", state.algorithm_state["np"] * 0.5 + 1)


def slopes(state: pl.State, **options: Any) -> pl.State:
    found = torch.autograd.grad(state.loss, list(state.params.values()), allow_unused=True, **options)
    size = 0.1 * sum(each.square().sum() for each in found if each is not None)
    return state.replace(loss=state.loss + size) if options.get("create_graph") else state.remember("size", size)


def numbered(state: pl.State) -> pl.State:
    return state.replace(outputs=(state.outputs, state.timestamp.batch))


class Closed:
    """No pytree, and no dataclass or attrs class, whose fields are found."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


def for_good(state: pl.State) -> pl.State:
    torch.set_default_dtype(torch.float64)
    return state


COUNTS, OWN = torch.zeros(2), torch.Generator()


def counted(outputs: Tensor, targets: Tensor) -> Tensor:
    torch.add(COUNTS, 1, out=COUNTS)
    return cross_entropy(outputs, targets)


SQUARE = partial(nn.Linear, 4, 4)
PAIRS = [(each[:8], each[:8]) for each in (x.repeat(2, 1) for x, _ in FIVE[:2])]
ITEMS = [{**batch, "name": [f"{i}", "b"], "index": i} for i, batch in enumerate(NAMED * 4)]
CLOSED: dict[str, Any] = {
    "model": net(lambda self, x: Closed(self.two(self.one(x)))),
    "loss": lambda outputs, _: outputs.scores.square().sum(),
}
# What is refused: settings of a run, and what the error says; "where possible" they train as eager steps do.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an if about a tensor": (
        doing(Event.AFTER_TRAIN_BATCH, "halves", if_large),
        "'halves' at AFTER_TRAIN_BATCH|state.loss > 0.5|torch.where",
    ),
    "a model that reads": ({"model": net(reads)}, "forward of Net|out.abs().max().item()"),
    "memory in NumPy": (
        doing(Event.BATCH_END, "np", halved_memory, init=lambda state: numpy.zeros(3)),
        "algorithm 'np' at BATCH_END|its memory is NumPy's",
    ),
    "a derivative of a forward elsewhere": (
        doing(Event.AFTER_LOSS, "slopes", partial(slopes, retain_graph=True)) | {"watch": FORWARD},
        "'slopes' at AFTER_LOSS can't be compiled: it differentiates",
    ),
    "another dtype for good": (doing(Event.BATCH_END, "for_good", for_good), "'for_good' at BATCH_END|another default"),
    "a loss that counts": ({"loss": counted}, "the loss can't be compiled: it writes to a tensor outside of the State"),
    "inputs that are targets": (
        {"model": net(lambda self, x: self.two(x.relu_()), None, SQUARE), "data": PAIRS, "loss": mse_loss},
        "the forward of Net can't be | shares |x = x.clone()",
    ),
    "closed outputs": (CLOSED, "a Closed holds tensors where no graph finds them"),
    "what each batch holds besides": (
        {"model": Named, "data": ITEMS, "loss": None, "max_duration": "1ep"},
        "batch 8 would need |'index'] is 8, |'name'] is ['8', 'b'].",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_can_not_hold_is_refused_or_runs_eagerly(name: str) -> None:
    settings, says = PLAIN | REFUSED[name][0], tuple(REFUSED[name][1].split("|"))
    error = check(Refusal(name, partial(fit, compile=True, **settings), CompileError, says))
    assert type(error) is CompileError
    assert torch.get_default_dtype() is torch.float32
    found = fit(compile="where possible", **settings)
    torch.set_default_dtype(torch.float32)
    wanted = fit(**settings)
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        torch.testing.assert_close(dict(one.params), dict(other.params))


def by_a_float(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * float(1 + state.timestamp.batch))


def with_numbers(function: Callable[[Any], Any], name: str = "own") -> dict[str, Any]:
    """An algorithm that makes something of the State at the end of a batch."""
    return doing(Event.BATCH_END, name, lambda state: state.remember(name, function(state)), init=function)


def seed_of(state: pl.State) -> Any:
    return derive(state.seed, "x", state.timestamp.batch)


def one_of(state: pl.State) -> torch.Generator:
    return generator(state.seed, "x")


def seeded_again(state: pl.State) -> Tensor:
    with seeded(seed_of(state)):
        torch.manual_seed(3)
        return torch.rand(3)


NONE = torch.zeros(())
DRAW = '|Draw from pl.random.generator(seed, "name", state.timestamp.batch, '
OF_ITS_OWN = "seeds a generator of its own" + DRAW
BY_DATA = "by what the graph is given|(aten.bernoulli.default)"
new = torch.Generator
# How numbers of the step and random numbers are used.
USED: dict[str, tuple[Callable[[pl.State], Any], str]] = {
    "a size": (lambda s: NONE.expand(s.timestamp.batch + 1, 2).sum(), "'own' at BATCH_END |write int(number)"),
    "its own generator": (lambda s: torch.rand(3, generator=OWN), "generator=OWN|a generator of its own" + DRAW),
    "by data": (
        lambda s: torch.bernoulli(s.params["2.bias"].sigmoid(), generator=one_of(s)),
        f"test_refusals|{BY_DATA}|torch.rand_like(p) <",
    ),
    "by draws": (lambda s: torch.bernoulli(torch.rand(3, generator=one_of(s)), generator=one_of(s)), BY_DATA),
    "Python's": (lambda s: NONE + random.Random(seed_of(s)).random(), "has no hash" + DRAW),
    "NumPy's": (lambda s: NONE + numpy.random.default_rng(seed_of(s)).random(), "bit_generator|" + OF_ITS_OWN),
    "torch's": (lambda s: torch.rand(3, generator=new().manual_seed(seed_of(s))), "manual_seed|" + OF_ITS_OWN),
    "Python's global": (lambda s: NONE + random.random(), "it calls random.random" + DRAW),
    "NumPy's global": (lambda s: NONE + numpy.random.beta(1, 1), "calls functions of numpy.random (in <lambda>"),
    "torch's global": (seeded_again, "it calls torch.manual_seed" + DRAW),
}


def noisy_update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
    return pl.FrozenDict({name: p - 0.1 * grads[name] + torch.randn_like(p) for name, p in params.items()}), memory


NOISY = pl.optim.Optimizer(name="own", init=lambda params: pl.FrozenDict(), update=noisy_update, lr=lambda t: 0.1)
Z, TARGETS = torch.view_as_complex(torch.randn(8, 4, 2, generator=problem.noise())), torch.zeros(8, dtype=torch.long)


def of_real(which: str, *before: Any) -> dict[str, Any]:
    lazy = Z.conj().imag if which == "neg" else Z.conj()
    return {"model": net(lambda self, z: self.one(z.real)), "data": [*before, (lazy, TARGETS)]}


SECOND = doing(Event.AFTER_LOSS, "slopes", partial(slopes, create_graph=True))
NUMBERED = doing(Event.AFTER_FORWARD, "x", numbered) | {"loss": lambda o, _: o[0].sum() * o[1], "watch": BEFORE_LOSS}
EVERY = doing(Event.AFTER_LOSS, "own", by_a_float) | {"data": FIVE, "max_duration": "2ep"}
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer that draws": ({"optimizer": NOISY}, "'own' can't be compiled: |global generator" + DRAW),
    "a second derivative": (SECOND | {"watch": LOSS}, "create_graph=True|leave its event out of watch="),
    "a number in every graph": (EVERY, "'own'|AFTER_LOSS|state.timestamp.batch|where possible"),
    "a negative": (of_real("neg", (Z.imag, TARGETS)), "tensor.resolve_neg()"),
    "a conjugate": (of_real("conj", (Z, TARGETS)), "tensor.resolve_conj()"),
    "a number as an output": (NUMBERED, "a number of the step is put into"),
    **{name: (with_numbers(function), says) for name, (function, says) in USED.items()},
}


def test_what_can_not_be_is_refused() -> None:
    for name, (run, says) in RUNS.items():
        check(Refusal(name, partial(fit, compile=True, **PLAIN | run), CompileError, tuple(says.split("|"))))


def test_what_is_not_finite_is_named_with_its_batch() -> None:
    with pytest.raises(pl.errors.NonFiniteError, match=r"batch 1 .*the loss is not finite"):
        fit(compile=True, data=WITH_NAN)
    huge = PLAIN | {"optimizer": pl.optim.sgd(lr=1e38), "loss": lambda o, t: 1e10 * cross_entropy(o, t)}
    with pytest.raises(pl.errors.NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(compile=True, **huge)


def test_a_second_derivative_is_part_of_a_graph() -> None:
    same(PLAIN | SECOND | {"watch": {Event.BEFORE_BACKWARD, Event.BATCH_END}})


# What is an error in eager steps, too, is the same one.


def penalised() -> dict[str, Any]:
    module = problem.mlp()
    return {"model": lambda: module, "loss": lambda o, t: o.mean() + next(module.parameters()).square().sum()}


def at_the_end(function: Callable[[Any], Any]) -> dict[str, Any]:
    """A function of 0, 1 and 2 in the first, second and third batch."""

    def remember(state: pl.State) -> pl.State:
        return state.remember("own", NONE.double() + torch.as_tensor(function(state.timestamp.batch)).sum())

    return doing(Event.AFTER_LOSS, "own", remember, init=lambda state: NONE.double()) | {"data": FIVE}


BYTES = torch.arange(9).reshape(3, 3).byte()
BATCH_2: dict[str, Callable[[Any], Any]] = {  # in the third batch, after two that go through the same graph
    "a number decides": lambda n: 1 if 1 / (2 - n) < 2 else 2,
    "beside a tensor": lambda n: NONE + 1 / (2 - n),
    "a tensor of bytes": lambda n: torch.tensor(n + 254, dtype=torch.uint8),
    "clamped": lambda n: BYTES.clamp(max=n + 254),
    "large": lambda n: torch.tensor(n << 62),
}
NO_GRAPH = {"loss": lambda outputs, _: outputs.detach().mean(), "watch": FORWARD}
ALIKE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a loss without a graph": (lambda: NO_GRAPH, "LossError|does not depend on any parameter"),
    "a loss that closes over the module": (penalised, "ModelError|was not called with"),
    **{name: (partial(at_the_end, function), "batch 2") for name, function in BATCH_2.items()},
}


@pytest.mark.parametrize("name", ALIKE)
def test_an_error_is_that_of_eager_steps(name: str) -> None:
    make, says = ALIKE[name]
    errors = []
    for compiles in (False, True):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its class is compared
            fit(**PLAIN | {"max_duration": "5ba"} | make() | {"compile": compiles})
        notes = [note for note in getattr(caught.value, "__notes__", []) if note.startswith("raised by")]
        errors.append((type(caught.value), notes))
        text = f"{type(caught.value).__name__} {caught.value} {notes}"
        assert all(part in text for part in says.split("|")), text
    if name == "large":  # torch's own class is another one there
        errors = [notes for _, notes in errors]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("model", [problem.mlp, lambda: pl.ensemble(problem.mlp, seeds=[0, 1])], ids=["one", "members"])
def test_what_can_not_be_traced_is_raised_and_not_logged_by_torch(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    with pytest.raises(CompileError, match="same reduction dim"):
        fit(**PLAIN | {"model": model, "data": [(torch.ones(4, 5), torch.ones(4).long())], "compile": True})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
