"""Law 9 for ``compile=``: the States at the events that are yielded are those of eager steps.

Most of these run the graphs operation by operation, which is quick and shows what is in them; the tests at the end go
through the compiler itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

import pure_loop as pl
import pure_loop.compile
from pure_loop import Event
from pure_loop.algorithms import ema, gradient_clipping, label_smoothing, sam
from pure_loop.compile import record
from pure_loop.errors import ArgumentError, ArgumentTypeError, CompileError, NonFiniteError
from pure_loop.frozendict import FrozenDict
from tests.models import CLASSES, FEATURES, Tied, batches, plain
from tests.sameness import assert_same, frozen_copy, leaves

EPOCHS = {Event.EPOCH_END}
BATCHES = {Event.BATCH_END}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Graphs are run as they are, and not compiled."""
    with pure_loop.compile.interpreted():
        yield


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a State, so that memory is reused."""
    from pure_loop.compile import compiler

    original = compiler.Stretch.__init__

    def init(self: Any, *args: Any, own: Any = None, shown: Any = None) -> None:
        original(self, *args, own=lambda tensors, _: tensors)

    monkeypatch.setattr(compiler.Stretch, "__init__", init)


def mlp() -> nn.Module:
    # No bias before the BatchNorm: its gradient is rounding error, which Adam makes into whole steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
    )


def stream(model: Callable[[], nn.Module] = mlp, **settings: Any) -> Iterator[tuple[Event, pl.State]]:
    with pl.random.seeded(3):
        module = model()
    given: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "2ep")),
        "max_duration": "2ep",
        "watch": EPOCHS,
    }
    data = settings.pop("data", None)
    return pl.fit(module, batches((8, 8, 5), 1) if data is None else data, **(given | settings))


def fit(model: Callable[[], nn.Module] = mlp, **settings: Any) -> list[tuple[Event, pl.State]]:
    return list(stream(model, **settings))


def assert_close(given: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Equal but for rounding, which is measured against the size of numbers of order 1."""
    assert [event for event, _ in given] == [event for event, _ in wanted]
    for (event, one), (_, other) in zip(given, wanted, strict=True):
        a, b = leaves(one), leaves(other)
        assert a.keys() == b.keys(), event
        for path, value in a.items():
            where = f"{path} at {event.name}, batch {one.timestamp.batch}"
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype) == (b[path].shape, b[path].dtype), where
                torch.testing.assert_close(
                    value.double(), b[path].double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=where
                )
            else:
                assert value == b[path] or value == pytest.approx(b[path]), where


class Parts:
    """A loss with parts."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entropy = cross_entropy(outputs, targets)
        return {"total": entropy + 0.1 * outputs.square().mean(), "entropy": entropy}


class Named(nn.Module):
    """Takes mappings, and draws by a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.head(dropout(self.embed(batch["ids"]), 0.2, self.training))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs["scores"], batch["labels"])


def named_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "ids": torch.randint(7, (6,), generator=generator),
            "labels": torch.randint(CLASSES, (6,), generator=generator),
        }
        for _ in range(3)
    ]


def several() -> list[Any]:
    return [label_smoothing(0.1), ema(half_life="4ba"), gradient_clipping("norm", 1.0)]


class Unused(nn.Module):
    """A parameter that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x[:, None].expand(-1, 3, -1))[:, -1])
        return out


@pl.algorithm(Event.AFTER_LOSS)
def by_the_last_evaluation(state: pl.State) -> pl.State:
    measured = state.metrics.get("eval")
    return state if measured is None else state.replace(loss=state.loss * (1 + measured["loss"]))


def signs(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    size = 0.01 * (1 - timestamp.elapsed)
    return FrozenDict({name: p - size * grads[name].sign() for name, p in params.items()}), opt_state


SIGNS = pl.optim.Optimizer(name="signs", init=lambda params: FrozenDict(), update=signs, lr=lambda timestamp: 0.01)

WITH_NAN = [(x * float("nan") if i == 1 else x, y) for i, (x, y) in enumerate(batches((8, 8, 8), 1))]
PARTITION = pl.optim.partition(
    {"first": pl.optim.adamw(lr=1e-2), "rest": pl.optim.sgd(lr=0.1)},
    lambda name, tensor: "first" if name.startswith("0") else "rest",
)

CASES: dict[str, dict[str, Any]] = {
    "dropout, BatchNorm, a ragged batch, a schedule": {},
    "seen at BATCH_END": {"watch": BATCHES},
    "microbatches": {"microbatch_size": 3, "watch": BATCHES},
    "AFTER_TRAIN_BATCH": {"watch": {Event.AFTER_TRAIN_BATCH}, "algorithms": several()},
    "BATCH_START": {"watch": {Event.BATCH_START}, "algorithms": several()},
    "AFTER_BACKWARD": {"watch": {Event.AFTER_BACKWARD, *BATCHES}, "microbatch_size": 3, "algorithms": several()},
    "algorithms": {"algorithms": several(), "clip_grad": 0.5, "watch": BATCHES},
    "algorithms inside": {"algorithms": several(), "clip_grad": 0.5},
    "SAM": {"algorithms": [sam(0.05, interval=2)], "watch": BATCHES},
    "tied and frozen": {"model": Tied, "watch": BATCHES},
    "a dict of losses": {"loss": Parts(), "watch": BATCHES},
    "mappings and integers": {"model": Named, "data": named_batches(), "loss": None, "watch": BATCHES},
    "SGD": {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)},
    "Nesterov": {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, nesterov=True, maximize=True)},
    "AMSGrad": {"optimizer": pl.optim.adam(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True)},
    "a partition": {"optimizer": PARTITION},
    "an optimizer of one's own": {"model": plain, "optimizer": SIGNS},
    "a parameter without a gradient": {"model": Unused, "watch": BATCHES},
    "attention": {"model": Attention, "optimizer": pl.optim.sgd(lr=0.1), "watch": BATCHES},
    "results of evaluations": {
        "model": plain,
        "algorithms": [by_the_last_evaluation],
        "evaluators": batches((8,), 2),
        "eval_interval": "1ba",
    },
    "skipping": {"nonfinite": "skip", "data": WITH_NAN, "watch": BATCHES},
    "evaluation": {"evaluators": batches((8, 5), 2), "eval_interval": "2ba", "watch": {Event.EVAL_END}},
}


QUICK = ("seen at BATCH_END", "AFTER_BACKWARD", "algorithms inside", "tied and frozen", "SGD", "skipping")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_the_same_states_at_what_is_yielded(name: str) -> None:
    assert_close(fit(compile=True, **CASES[name]), fit(**CASES[name]))


@pytest.mark.usefixtures("interpreted", "in_place")
@pytest.mark.parametrize(
    "name",
    ["algorithms inside", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("SAM", "Nesterov"))],
)
def test_in_its_own_memory(name: str) -> None:
    settings = CASES[name] | {"watch": {Event.FIT_END}}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("precision", ["amp_bf16", pytest.param("amp_fp16", marks=pytest.mark.thorough)])
def test_mixed_precision(precision: str) -> None:
    settings: dict[str, Any] = {"model": plain, "precision": precision, "watch": BATCHES}
    assert_close(fit(compile=True, **settings), fit(**settings), 2e-2)


@pytest.mark.usefixtures("interpreted")
def test_exact_arithmetic_is_exact() -> None:
    def whole() -> nn.Module:
        module = nn.Linear(FEATURES, 1).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(2.0)
        return module

    data = [(x.double().round(), x.double().round().sum(dim=1, keepdim=True)) for x, _ in batches((8, 8), 1)]
    settings: dict[str, Any] = {
        "model": whole,
        "data": data,
        "loss": mse_loss,
        "optimizer": pl.optim.sgd(lr=0.125),
        "max_duration": "2ba",
        "microbatch_size": 4,
        "watch": BATCHES,
    }
    assert_close(fit(compile=True, **settings), fit(**settings), 0.0)


@pytest.mark.usefixtures("interpreted")
def test_states_stay_what_they_were() -> None:
    kept = []
    for _, state in stream(compile=True, watch=BATCHES, algorithms=[ema(half_life="2ba")]):
        kept.append((state, frozen_copy(state)))
    for state, before in kept:
        assert_same(state, before, "a State that was kept")


@pytest.mark.usefixtures("interpreted")
def test_going_on_from_a_state() -> None:
    whole = fit(compile=True, watch=BATCHES, max_duration="3ep", algorithms=several())
    kept = next(state for _, state in whole if state.timestamp.batch == 4)
    data = batches((8, 8, 5), 1)
    rest = list(
        pl.fit(
            kept,
            data,
            loss=cross_entropy,
            optimizer=pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "2ep")),
            max_duration="3ep",
            watch=BATCHES,
            compile=True,
            algorithms=several(),
        )
    )
    assert_close(rest, [pair for pair in whole if pair[1].timestamp.batch > 4], 0.0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.thorough), 3, 8])
def test_several_steps_a_call(steps: int) -> None:
    settings: dict[str, Any] = {
        "data": batches((8, 8, 8, 8, 5), 1),
        "max_duration": "13ba",
        "evaluators": batches((8,), 2),
        "eval_interval": "4ba",
        "algorithms": [ema(half_life="4ba"), every_third],
        "watch": {Event.EPOCH_END, Event.EVAL_END, Event.FIT_END},
    }
    assert_close(fit(compile=True, steps_per_call=steps, **settings), fit(**settings))


# Recompilation, and what is decided in Python.


@pl.algorithm(Event.AFTER_LOSS, when="3ba")
def every_third(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * 2)


@pl.algorithm(Event.AFTER_LOSS)
def anneal(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * (1 - 0.5 * state.timestamp.elapsed))


@pl.algorithm(Event.BATCH_END, init=lambda state: 0)
def count(state: pl.State) -> pl.State:
    return state.remember("count", state.algorithm_state["count"] + 1)


@pl.algorithm(Event.AFTER_LOSS)
def by_the_batch(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * float(1 + state.timestamp.batch))


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def on_large_losses(state: pl.State) -> pl.State:
    if state.loss > 0.5:
        return state.replace(grads={name: grad / 2 for name, grad in state.grads.items()})
    return state


@pl.algorithm(Event.BATCH_END)
def noise(state: pl.State) -> pl.State:
    generator = pl.random.generator(state.seed, "noise", state.timestamp.batch)
    return state.replace(
        params={k: v + 0.01 * torch.randn(v.shape, generator=generator) for k, v in state.params.items()}
    )


SHORT: dict[str, Any] = {"model": plain, "data": batches((8,) * 5, 1)}


@pytest.mark.usefixtures("interpreted")
def test_numbers_that_change_need_no_other_graph() -> None:
    settings = SHORT | {"algorithms": [anneal, count, ema(half_life="3ba")]}
    with record() as made:
        compiled = fit(compile=True, **settings)
    assert_close(compiled, fit(**settings))
    assert [(each.stretch, each.number) for each in made] == [("step", 1)]
    assert compiled[-1][1].algorithm_state["count"] == 10


@pytest.mark.usefixtures("interpreted")
def test_another_shape_and_another_decision_are_another_graph() -> None:
    with record() as made:
        fit(compile=True, model=plain, algorithms=[every_third], data=batches((8, 8, 8, 8, 5), 1))
    assert [each.number for each in made] == [1, 2, 3, 4]
    assert "every_third" in made[1].reason
    assert "shapes" in made[2].reason


@pytest.mark.usefixtures("interpreted")
def test_an_evaluation_makes_no_other_graph_of_the_step() -> None:
    with record() as made:
        fit(compile=True, evaluators=batches((8,), 2), eval_interval="1ba", **SHORT)
    assert sorted(each.stretch for each in made) == ["evaluation", "step"]


@pytest.mark.usefixtures("interpreted")
def test_a_number_baked_into_every_graph_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"by_the_batch.*AFTER_LOSS.*state\.timestamp\.batch") as caught:
        fit(compile=True, algorithms=[by_the_batch], **SHORT)
    assert "where possible" in str(caught.value)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (on_large_losses, r"on_large_losses.*AFTER_TRAIN_BATCH.*state\.loss > 0\.5.*torch\.where"),
        (noise, "noise.*BATCH_END"),
    ],
)
def test_what_cannot_be_traced(algorithm: Any, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        fit(compile=True, algorithms=[algorithm], **SHORT)
    settings = SHORT | {"algorithms": [ema(half_life="3ba"), algorithm]}
    assert_close(fit(compile="where possible", **settings), fit(**settings))


class Reads(nn.Module):
    """A forward that looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.abs().max().item() < 100 else out.clamp(-100, 100)


@pytest.mark.usefixtures("interpreted")
def test_a_model_that_cannot_be_traced() -> None:
    with pytest.raises(CompileError, match=r"forward of Reads.*out\.abs\(\)\.max\(\)\.item\(\)"):
        fit(Reads, compile=True)
    settings: dict[str, Any] = {"evaluators": batches((8,), 2), "watch": BATCHES}
    assert_close(fit(Reads, compile="where possible", **settings), fit(Reads, **settings))


@pytest.mark.usefixtures("interpreted")
def test_where_possible_with_every_event() -> None:
    settings: dict[str, Any] = {"watch": None, "algorithms": several(), "max_duration": "2ba"}
    assert_close(fit(compile="where possible", **settings), fit(**settings))


@pytest.mark.usefixtures("interpreted")
def test_a_loss_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 1 .*the loss is not finite"):
        fit(compile=True, data=WITH_NAN)


@pytest.mark.usefixtures("interpreted")
def test_an_update_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(plain, compile=True, optimizer=pl.optim.sgd(lr=1e38), loss=lambda o, t: 1e10 * cross_entropy(o, t))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"compile": "always"}, ArgumentError, "where possible"),
        ({"compile": 1}, ArgumentError, "compile=1"),
        ({"compile": True, "steps_per_call": 0}, ArgumentError, "at least 1"),
        ({"compile": True, "steps_per_call": 2.5}, ArgumentTypeError, "whole number"),
        ({"steps_per_call": 2}, ArgumentError, "compile=True"),
        ({"compile": True, "steps_per_call": 2, "order": "2021"}, ArgumentError, "2021"),
    ],
)
def test_the_door(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fit(**settings)


@pytest.mark.usefixtures("interpreted")
def test_evaluation_and_prediction_by_themselves() -> None:
    module, data = mlp(), batches((8, 5), 2)

    def both(compile: bool) -> Iterator[Any]:
        yield from pl.evaluate(module, data, loss=cross_entropy, compile=compile)
        yield from pl.predict(module, data, compile=compile)

    assert_close(list(both(True)), list(both(False)))


# Through the compiler.


@pytest.mark.thorough
def test_compiled_steps() -> None:
    settings: dict[str, Any] = {
        "data": batches((8, 8), 1),
        "algorithms": several(),
        "evaluators": batches((8,), 2),
        "watch": {Event.EPOCH_END, Event.EVAL_END},
    }
    with record() as made:
        compiled = fit(compile=True, **settings)
    assert_close(compiled, fit(**settings), 1e-5)
    assert all(each.seconds > 0 and each.operations > 10 for each in made)


def test_a_compiler_that_forgets_factors() -> None:
    # torch 2.13 merges `a + 0.01 * b` with a matrix product, and leaves out the 0.01.
    settings: dict[str, Any] = {
        "model": plain,
        "data": batches((8, 8), 1),
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, weight_decay=0.01),
        "watch": {Event.FIT_END},
    }
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-5)


@pytest.mark.thorough
def test_a_compiler_that_believes_in_zero() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(plain, compile=True, optimizer=pl.optim.sgd(lr=1e38), loss=lambda o, t: 1e10 * cross_entropy(o, t))


def test_importing_pure_loop_imports_no_compiler() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; before = set(sys.modules); import pure_loop; new = set(sys.modules) - before; "
        "compilers = ('pure_loop.compile', 'torch._inductor', 'torch._dynamo', 'torch.fx'); "
        "bad = [name for name in new if name.startswith(compilers)]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


ALGORITHMS: tuple[Any, ...] = (ema(half_life="3ba"), gradient_clipping("norm", 1.0))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "watch",
    [None, BATCHES, EPOCHS, {Event.AFTER_BACKWARD}, {Event.AFTER_FORWARD, Event.EPOCH_END}, {Event.AFTER_TRAIN_BATCH}],
    ids=["all", "batches", "epochs", "after backward", "after forward", "after train batch"],
)
@pytest.mark.parametrize("donate", [False, "auto", True], ids=str)
@pytest.mark.parametrize("compile", [False, True, "where possible"], ids=str)
def test_every_combination_of_fast_paths_gives_the_same_states(watch: Any, donate: Any, compile: Any) -> None:
    """Law 9. Copies are compared, so that memory may be reused; and what was kept stays what it was."""
    settings: dict[str, Any] = {"watch": watch, "algorithms": ALGORITHMS, "microbatch_size": 3}
    settings["evaluators"] = batches((4,), 2)
    wanted = fit(**settings, donate=False)
    given, kept = [], []
    for _, state in stream(**settings, donate=donate, compile=compile):
        given.append(frozen_copy(state))
        if donate is not True:
            kept.append((state, given[-1]))
    assert len(given) == len(wanted)
    for index, (one, (event, other)) in enumerate(zip(given, wanted, strict=True)):
        for path, value in leaves(other).items():
            where = f"{path} at {event.name}, position {index}"
            if isinstance(value, Tensor):
                torch.testing.assert_close(one[path], value, rtol=2e-6, atol=2e-6, equal_nan=True, msg=where)
            else:
                assert one[path] == value or one[path] == pytest.approx(value), where
    for state, numbers in kept:
        assert_same(leaves(state), numbers, "kept")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("steps", [1, 3])
def test_memory_is_copied_after_somebody_was_shown_a_state_and_only_then(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    from pure_loop.donation import Donation

    asked: list[bool] = []
    real = Donation.own

    def own(self: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        given = real(self, tensors, alone)
        asked.append(given is not tensors)
        return given

    monkeypatch.setattr(Donation, "own", own)
    fit(compile=True, steps_per_call=steps, max_duration="3ep")
    # The first step is given the memory of the model, which is copied without asking.
    assert asked == [True, False, True, False, False, True, False, False]
    asked.clear()
    fit(compile=True, steps_per_call=steps, watch=BATCHES)
    assert asked
    assert all(asked)
    asked.clear()
    fit(compile=True, steps_per_call=steps, donate=False)
    assert not asked


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_that_never_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from pure_loop.donation import Donation

    monkeypatch.setattr(Donation, "own", lambda self, tensors, alone: tensors)
    kept = [(state, frozen_copy(state)) for _, state in stream(compile=True, max_duration="3ep")]
    assert not all(
        torch.equal(state.params[name], numbers[f"params.{name}"]) for state, numbers in kept for name in state.params
    )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("watch", [EPOCHS, {Event.EPOCH_START, Event.EVAL_END}], ids=["epochs", "evaluations"])
def test_what_was_kept_never_changes_whatever_goes_through_in_one_call(steps: int, watch: Any) -> None:
    settings: dict[str, Any] = {"watch": watch, "max_duration": "5ep", "evaluators": batches((4,), 2)}
    kept = [(state, frozen_copy(state)) for _, state in stream(**settings, compile=True, steps_per_call=steps)]
    for state, numbers in kept:
        assert_same(leaves(state), numbers, "kept")
