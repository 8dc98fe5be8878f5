"""The loops of examples/from_scratch are the library's loop: the same events and the same parameters, on drawn runs.

Parameters are equal bit for bit where the arithmetic is the same. The optimizer is that of ``torch.optim.SGD``, whose
two operations the examples write out; the fused kernel of ``pl.optim.sgd`` adds the momentum with another rounding.
The loops of 40 and 80 lines don't weigh a batch, and the library does: to multiply by ``n / 2**k`` and to divide by it
again is exact for a batch of ``2**k`` samples alone, which theirs are here.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from tests.conftest import THOROUGH
from tests.support import problem

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "from_scratch"
LOOPS = {40: "loop_in_40_lines", 80: "loop_in_80_lines", 160: "loop_in_160_lines"}
FEW, MANY = 6, 200 if THOROUGH else 12
POWERS = st.sampled_from([1, 2, 4, 8])
seeds = st.integers(0, 2**31)


def loop_of(lines: int, replaced: str = "", by: str = "") -> Any:
    """The example as a module, with a part of its text replaced."""
    text = (FOLDER / f"{LOOPS[lines]}.py").read_text()
    assert replaced in text
    module = ModuleType(f"{LOOPS[lines]}_for_tests")
    sys.modules[module.__name__] = module
    exec(compile(text.replace(replaced, by), LOOPS[lines], "exec"), module.__dict__)
    return module


def network(seed: int, *further: nn.Module, dropout: bool = True) -> nn.Module:
    with pl.random.seeded(seed):
        middle = [*further, nn.Tanh(), *([nn.Dropout(0.3)] if dropout else [])]
        return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 3))


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    ((inputs, targets),) = problem.points(1, size=count, seed=seed)
    return inputs, targets


class Epochs:
    """The order of the examples' ``shuffled``, as data of the library."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, seed: int) -> None:
        self.inputs, self.targets, self.size, self.seed, self.epoch = inputs, targets, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.inputs), generator=pl.random.generator(self.seed, "order", self.epoch))
        return iter([(self.inputs[rows], self.targets[rows]) for rows in torch.split(order, self.size)])

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.size)


def sgd(lr: Any, momentum: float = 0.0) -> pl.optim.Optimizer:
    return pl.optim.from_torch(torch.optim.SGD, lr=lr, momentum=momentum, foreach=False, fused=False)


def assert_same(ours: dict[str, Tensor], library: Any) -> None:
    assert set(ours) == set(library)
    for name, tensor in ours.items():
        assert torch.equal(tensor, library[name]), name


def assert_same_streams(ours: Any, library: Any) -> None:
    """The same events, of those that the example has, and the same parameters, losses and gradients at each."""
    ours = list(ours)
    known = {event for event, _ in ours}
    theirs = [(event.value, state) for event, state in library if event.value in known]
    assert [event for event, _ in ours] == [event for event, _ in theirs]
    for (event, one), (_, other) in zip(ours, theirs, strict=True):
        time = getattr(one, "timestamp", one)
        assert (time.epoch, time.batch) == (other.timestamp.epoch, other.timestamp.batch)
        assert_same(one.params, other.params)
        if event in ("after_loss", "after_train_batch", "batch_end"):
            torch.testing.assert_close(one.loss, other.loss)
        if event == "after_train_batch":
            assert_same(one.grads, other.grads)


def run_law(law: Callable[..., None], count: int, *draws: st.SearchStrategy[Any]) -> None:
    """Try a law on drawn runs. What is deliberately wrong need not be shrunk."""
    shrinks = Phase.shrink if count > FEW else Phase.generate
    options = settings(max_examples=count, database=None, report_multiple_bugs=False, phases={Phase.generate, shrinks})
    options(given(*draws)(law))()


# 40 lines: no dropout, which has no seeds yet.


def law_of_40(loop: Any, count: int = FEW) -> None:
    def law(lengths: list[int], epochs: int, lr: float, seed: int) -> None:
        model = network(seed, dropout=False)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        data = [samples(length, seed + index) for index, length in enumerate(lengths)]
        ours = list(loop.fit(model, data, cross_entropy, lr, epochs))
        assert_same_streams(ours, problem.fit(model, data, optimizer=sgd(lr), max_duration=f"{epochs}ep"))
        assert_same(before, dict(model.named_parameters()))
        assert_same(before, ours[0][1].params)

    run_law(law, count, st.lists(POWERS, min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([0.5, 0.1]), seeds)


# 80 lines: the algorithms are the same functions in both loops.


def shrink(state: Any) -> Any:
    penalty = sum(tensor.square().sum() for tensor in state.params.values())
    return state.replace(loss=state.loss + 0.125 * penalty)


def halve(state: Any) -> Any:
    return state.replace(grads={name: 0.5 * grad for name, grad in state.grads.items()})


def disturb(state: Any) -> Any:
    drawn = pl.random.generator(state.seed, "disturb", getattr(state, "timestamp", state).batch)
    return state.replace(grads={name: g + torch.randn(g.shape, generator=drawn) for name, g in state.grads.items()})


ALGORITHMS = {"shrink": ("after_loss", shrink), "halve": ("after_train_batch", halve)}
BOTH_ORDERS = {**ALGORITHMS, "disturb": ("after_train_batch", disturb)}


def in_library(named: dict[str, Any]) -> list[pl.Algorithm]:
    return [pl.Algorithm(name, {pl.Event(event): function}) for name, (event, function) in named.items()]


def law_of_80(loop: Any, count: int = FEW) -> None:
    def law(size: int, whole: int, epochs: int, momentum: float, names: set[str], seed: int) -> None:
        model, (inputs, targets) = network(seed), samples(size * whole, seed)
        chosen = {name: ALGORITHMS[name] for name in sorted(names)}
        options = {"model": model, "loss": cross_entropy, "lr": 0.1, "momentum": momentum, "epochs": epochs}
        options["batches"] = functools.partial(loop.shuffled, inputs, targets, size)

        def fit(state: Any) -> list[Any]:
            return list(loop.fit(state, list(chosen.values()), **options))

        settings = {"optimizer": sgd(0.1, momentum), "max_duration": f"{epochs}ep", "algorithms": in_library(chosen)}
        ours = fit(loop.begin(model, seed))
        assert_same_streams(ours, problem.fit(model, Epochs(inputs, targets, size, seed), seed=seed, **settings))
        assert_resumes(ours, fit, ("epoch_start", "batch_end", "epoch_end"))

    names = st.sets(st.sampled_from([*ALGORITHMS]))
    run_law(law, count, POWERS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.9]), names, seeds)


def assert_resumes(stream: list[Any], fit: Callable[[Any], list[Any]], boundaries: tuple[str, ...]) -> None:
    """From every boundary the rest of a stream follows, after the FIT_START of each call, bit for bit."""
    for index, (event, state) in enumerate(stream):
        if event in boundaries:
            rest = [pair for pair in fit(state) if pair[0] != "fit_start"]
            expected = [pair for pair in stream[index + 1 :] if pair[0] != "fit_start"]
            assert [one for one, _ in rest] == [one for one, _ in expected]
            for (_, one), (_, other) in zip(rest, expected, strict=True):
                assert_same(one.params, other.params)
                assert_same(one.momentum, other.momentum)


# 160 lines


class Centred(nn.Module):
    """A running mean in a buffer, which depends on the order and the sizes of the microbatches, of any size."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs - self.mean


def law_of_160(loop: Any, count: int = FEW) -> None:
    def law(shape: Any, duration: tuple[int, str], labels: list[str], names: list[str], seed: int) -> None:
        (size, samples_in_all, microbatch_size), (length, unit) = shape, duration
        model, (inputs, targets) = network(seed, Centred()), samples(samples_in_all, seed)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        shared: dict[str, Any] = {"loss": cross_entropy, "microbatch_size": microbatch_size}
        shared["evaluators"] = {label: [samples(3, seed), samples(2, seed + 1)] for label in labels}
        chosen = {name: BOTH_ORDERS[name] for name in names}
        task = loop.Task(
            model=model,
            batches=functools.partial(loop.shuffled, inputs, targets, size),
            lr=decayed,
            until=lambda time: (time.epoch if unit == "ep" else time.batch) >= length,
            momentum=0.9,
            **shared,
        )
        algorithms = [loop.Algorithm(name, *bound) for name, bound in chosen.items()]
        shared |= {"optimizer": sgd(decayed, 0.9), "max_duration": f"{length}{unit}", "algorithms": in_library(chosen)}

        def library() -> pl.Stream:
            return problem.fit(model, Epochs(inputs, targets, size, seed), seed=seed, strict=False, **shared)

        def fit(state: Any) -> list[Any]:
            return list(loop.fit(state, task, algorithms))

        ours, theirs = fit(loop.begin(model, seed)), list(library())
        assert_same_streams(ours, theirs)
        last, its_last = ours[-1][1], theirs[-1][1]
        assert_same(last.buffers, its_last.buffers)
        assert last.timestamp.sample == its_last.timestamp.sample
        assert {*last.metrics} == {*its_last.metrics} == {*labels}
        for label, measured in last.metrics.items():
            assert measured == pytest.approx({name: float(its_last.metrics[label][name]) for name in measured})
        assert_resumes(ours, fit, loop.BOUNDARIES)
        assert_same(before, model.state_dict())
        assert model.training
        blamed = loop.blame(loop.begin(model, seed), task, algorithms)
        counted = Counter((change.by, change.leaf) for change in pl.blame(library()).changes)
        assert {key: count for key, count in blamed.items() if key[0] in names} == {
            key: count for key, count in counted.items() if key[0] in names
        }

    sizes = st.tuples(st.integers(1, 6), st.integers(1, 14), st.none() | st.integers(1, 6))
    durations = st.tuples(st.integers(1, 2), st.just("ep")) | st.tuples(st.integers(1, 7), st.just("ba"))
    labels = st.lists(st.sampled_from(["val", "test"]), unique=True)
    run_law(law, count, sizes, durations, labels, st.permutations([*BOTH_ORDERS]), seeds)


def decayed(time: Any) -> float:
    return 0.1 / (1 + int(time.batch))


WRONG: dict[int, dict[str, tuple[str, str]]] = {
    40: {
        "it writes in place": ("torch.add(param, grads[name], alpha=-lr)", "param.add_(grads[name], alpha=-lr)"),
        "the module is trained": (".detach().clone()", ".detach().mul_(0.5)"),
    },
    80: {
        "each batch of an epoch has the same dropout": ("state.epoch, state.batch, 0, 0", "state.epoch, 0, 0, 0"),
        "each epoch has the same order": ('"order", epoch', '"order", 0'),
        "the momentum stays behind": ("params=params, momentum=moved,", "params=params,"),
        "the script doesn't get the algorithms' State": ("received = state.replace(event=event)", "received = state"),
    },
    160: {
        "a microbatch weighs as much as each other one": ("len(x) / power)", "size / power)"),
        "microbatches drop out alike": ("time.batch, index, 0", "time.batch, 0, 0"),
        "each microbatch begins with the buffers of the batch": ("buffers=buffers, loss=loss", "loss=loss"),
        "evaluation is in train mode": (").eval()", ").train()"),
        "a batch of an evaluation counts once": ("* len(inputs), right", "* 2, right"),
        "algorithms are never in reverse": ("reversed(bound)", "bound"),
        "the module's mode is changed": ("copy.deepcopy(task.model).eval()", "task.model.eval()"),
        "it resumes after the evaluation": ("while at in INSIDE_EPOCH or", "while"),
    },
}


def law_of(lines: int, loop: Any, count: int = FEW) -> None:
    if lines == 160:
        law_of_160(loop, count=MANY)
    else:
        (law_of_40 if lines == 40 else law_of_80)(loop, count=count)


@pytest.mark.parametrize("lines", LOOPS)
def test_a_loop_trains_as_the_library_does_and_is_as_long_as_it_says(lines: int) -> None:
    law_of(lines, loop_of(lines), MANY)
    loop = (FOLDER / f"{LOOPS[lines]}.py").read_text().partition("\ndef main")[0]
    assert 0.8 * lines <= len([line for line in loop.splitlines() if line.strip()]) <= 1.03 * lines


@pytest.mark.parametrize("lines", [40, 80, pytest.param(160, marks=pytest.mark.slow)])  # many drawn runs a mistake
def test_what_is_wrong_is_found(lines: int) -> None:
    for wrong, (right, by) in WRONG[lines].items():
        try:
            law_of(lines, loop_of(lines, right, by))
        except AssertionError:
            continue
        pytest.fail(wrong)


def test_a_run_resumes_from_boundaries_alone() -> None:
    loop, model = loop_of(160), network(0)
    task = loop.Task(model, lambda seed, epoch: [samples(4, 0)], cross_entropy, decayed, lambda time: time.batch >= 1)
    inside = next(state for event, state in loop.fit(loop.begin(model, 0), task) if event == "after_loss")
    with pytest.raises(ValueError, match=r"can't resume from after_loss.*epoch_checkpoint"):
        list(loop.fit(inside, task))


@pytest.mark.slow  # examples as users run them
def test_it_shows_something(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    for lines, says in SHOWN.items():
        loop_of(lines).main()
        assert re.search(says, capsys.readouterr().out, re.DOTALL)


SHOWN = {40: "epoch  1, .*epoch 12, .*passed: 10", 80: "11 of 11 .*other bits", 160: "resumed .*the same bits.*clip"}
