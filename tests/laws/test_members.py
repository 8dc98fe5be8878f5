"""Law 17: each member of an ensemble is at each event what it would be alone; taken out or resumed it ends as it would.

In float64, where rounding can't be mistaken for anything else. Adam divides a gradient by its own size, and so makes a
step out of the rounding of one that is mathematically 0: that of a bias before a norm, or of the keys of an attention.
Such layers have no bias here.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import members
from pure_loop.members import stacking
from pure_loop.members.stacking import split
from pure_loop.order import BOUNDARIES
from pure_loop.testing import differences
from tests.support.members import Pick, Sweep, alone, assert_alike, differing, together
from tests.support.problem import noise
from tests.support.tiers import examples

MOST = 4


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Sequence(nn.Module):
    """Embedded words through a norm and dropout to one of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.drop, self.head = (
            nn.Embedding(5, 6),
            nn.LayerNorm(6),
            nn.Dropout(0.3),
            nn.Linear(6, 3),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.words(words))).mean(1))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def frozen() -> nn.Module:
    module = mlp()
    module.get_submodule("0").requires_grad_(False)
    return module


def convolution() -> nn.Module:
    layers = nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (mlp, lambda n, g: torch.randn(n, 4, generator=g)),
    "frozen": (frozen, lambda n, g: torch.randn(n, 4, generator=g)),
    "convolution": (convolution, lambda n, g: torch.randn(n, 2, 6, 6, generator=g)),
    "words": (Sequence, lambda n, g: torch.randint(5, (n, 4), generator=g)),
}
RATES = [0.1, 0.03, 0.2, 0.07]
OPTIMIZERS: dict[str, Callable[[Pick], Any]] = {
    "sgd": lambda pick: pl.optim.sgd(lr=pick(RATES), momentum=pick([0.9, 0.3, 0.5, 0.8]), weight_decay=0.01),
    "adam": lambda pick: pl.optim.adam(lr=pick(RATES), betas=(pick([0.9, 0.8, 0.7, 0.6]), 0.99), eps=1e-3),
    "adamw": lambda pick: pl.optim.adamw(lr=pick(RATES), weight_decay=pick([0.0, 0.1, 0.2, 0.3]), eps=1e-3),
    "lamb": lambda pick: pl.optim.lamb(lr=pick(RATES), betas=(0.9, pick([0.99, 0.98, 0.97, 0.96])), eps=1e-3),
    "scheduled": lambda pick: pl.optim.sgd(lr=pick([pl.schedules.cosine("1dur", rate) for rate in RATES])),
    "several schedules": lambda pick: pl.optim.sgd(
        lr=pick(
            [
                pl.schedules.step("2ba", 0.5, 0.1),
                0.1,
                pl.schedules.linear(0.1, 0.0, "1dur"),
                lambda t: 0.1 / (1 + t.batch),
            ]
        )
    ),
    "partition": lambda pick: pl.optim.partition(
        {"first": pl.optim.adamw(lr=pick(RATES), eps=1e-3), "rest": pl.optim.sgd(lr=0.1, momentum=pick(RATES))},
        lambda name, tensor: "rest" if "weight" in name else "first",
    ),
}
ALGORITHMS: dict[str, Callable[[Pick], pl.Algorithm]] = {
    "clipping": lambda pick: pl.algorithms.gradient_clipping("norm", pick([0.1, 0.2, 0.3, 10.0])),
    "ema": lambda pick: pl.algorithms.ema(half_life="3ba"),
    "sam": lambda pick: pl.algorithms.sam(pick([0.05, 0.1, 0.02, 0.01])),
    "noise": lambda pick: pl.algorithms.gradient_noise(pick([0.01, 0.1, 0.02, 0.05])),
    "mixup": lambda pick: pl.algorithms.mixup(pick([0.2, 0.5, 1.0, 0.3])),
    "smoothing": lambda pick: pl.algorithms.label_smoothing(pick([0.0, 0.1, 0.2, 0.3])),
    "lookahead": lambda pick: pl.algorithms.lookahead(2, 0.5),
    "swa": lambda pick: pl.algorithms.swa("1ba", interval="1ba"),
    "stopping": lambda pick: pl.algorithms.threshold_stopping("val/loss", 1.05),
}
FLOATS = [name for name in ALGORITHMS if name != "mixup"]


def batches(model: str, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = noise(1)
    return [(MODELS[model][1](n, generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def loader(model: str, sizes: tuple[int, ...]) -> Any:
    """In another order for each seed and epoch, the last batch smaller."""
    inputs, targets = batches(model, (sum(sizes),))[0]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=5, shuffle=True)


@st.composite
def sweeps(draw: st.DrawFn, *, fallbacks: tuple[str | None, ...] = (None, None, None, "loop")) -> Sweep:
    """Ensembles of all kinds."""
    model = draw(st.sampled_from(sorted(MODELS)))
    optimizer = OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]
    names = sorted(ALGORITHMS if model != "words" else FLOATS)
    algorithms = [ALGORITHMS[name] for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True))]
    sizes = draw(st.sampled_from([(5, 5, 3), (4, 4), (6,)]))
    shuffled = draw(st.booleans())
    plan = {
        "max_duration": draw(st.sampled_from(["2ep", "5ba", "17sp"])),
        "microbatch_size": draw(st.sampled_from([None, None, 3])),
        "batches_per_step": draw(st.sampled_from([1, 1, 2])),
        "clip_grad": draw(st.sampled_from([None, 0.5])),
        "nonfinite": draw(st.sampled_from(["error", "skip"])),
        "train_metrics": draw(st.sampled_from([None, [pl.metrics.accuracy()]])),
        "evaluators": {"val": batches(model, (4, 3))},
        "eval_interval": draw(st.sampled_from(["1ep", "2ba"])),
        "watch": draw(st.sampled_from([None, {Event.BATCH_END, Event.EVAL_END, Event.FIT_END}])),
    }

    def settings(pick: Pick) -> dict[str, Any]:
        return plan | {"optimizer": optimizer(pick), "algorithms": [make(pick) for make in algorithms]}

    seeds = tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=MOST)))
    ensemble = {"data": draw(st.sampled_from(["shared", "own"])), "fallback": draw(st.sampled_from(fallbacks))}
    return Sweep(MODELS[model][0], (loader if shuffled else batches)(model, sizes), settings, seeds, ensemble)


@examples(6, 500)
@given(sweeps())
def test_each_member_is_what_it_is_alone(sweep: Sweep) -> None:
    assert_alike(sweep)


@pytest.mark.slow
@examples(3, 60)
@given(sweeps(fallbacks=(None,)))
def test_each_member_of_compiled_steps_is_what_it_is_alone(sweep: Sweep) -> None:
    """Of machine code, which takes half a minute to make for each."""
    assert_alike(attrs.evolve(sweep, more={"compile": True}))


def everything(data: str = "shared", fallback: str | None = None) -> Sweep:
    """Three members with a memory, an evaluation and a shuffled dataloader."""
    algorithms = [ALGORITHMS["clipping"], ALGORITHMS["ema"], ALGORITHMS["noise"]]

    def settings(pick: Pick) -> dict[str, Any]:
        return {
            "max_duration": "2ep",
            "optimizer": OPTIMIZERS["adamw"](pick),
            "algorithms": [make(pick) for make in algorithms],
            "evaluators": {"val": batches("mlp", (4, 3))},
            "eval_interval": "2ba",
        }

    return Sweep(mlp, loader("mlp", (5, 5, 3)), settings, (7, 8, 9), {"data": data, "fallback": fallback})


# A batch of each member is compared as that of each.
BATCHES = frozenset({"batch", "microbatch"})
# A file holds what lasts.
OF_A_BATCH = BATCHES | {"outputs", "loss", "grads", "grad_norm", "position"}
KINDS = pytest.mark.parametrize("kind", ["shared", "own", "loop"])


def of_kind(kind: str) -> Sweep:
    return everything(fallback="loop") if kind == "loop" else everything(kind)


WATCHED = {Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.EVAL_END, Event.FIT_END}


@functools.cache
def watched(kind: str) -> list[tuple[Event, pl.State]]:
    return list(together(of_kind(kind), watch=WATCHED))


@examples(6, 200)
@given(st.sampled_from(["shared", "own", "loop"]), st.data(), st.booleans())
def test_an_ensemble_resumes_from_a_boundary_bitwise(kind: str, data: st.DataObject, in_file: bool) -> None:
    """From a State that was kept, or from one that was saved and loaded."""
    sweep, pairs = of_kind(kind), watched(kind)
    place = data.draw(st.sampled_from([place for place, (event, _) in enumerate(pairs) if event in BOUNDARIES]))
    _, state = pairs[place]
    if in_file:
        with tempfile.TemporaryDirectory() as folder:
            pl.save(state, path := Path(folder) / "members.safetensors")
            loaded = pl.load(path, model=sweep.make())
        assert differences(loaded, state, without=OF_A_BATCH) == []
        state = loaded
    wanted = pairs[place + 1 :]
    resumed = list(together(sweep, state, watch=WATCHED))[-len(wanted) :]
    assert [event for event, _ in resumed] == [event for event, _ in wanted]
    for (event, value), (_, wanted_state) in zip(resumed, wanted, strict=True):
        assert differences(value, wanted_state, without=BATCHES) == [], event


@KINDS
def test_a_member_taken_out_at_a_boundary_goes_on_alone_to_where_it_would_have_come(kind: str) -> None:
    sweep = of_kind(kind)
    pairs = list(together(sweep))
    _, end = pairs[-1]
    for event, state in pairs:
        if event in BOUNDARIES:
            for number in range(len(sweep.seeds)):
                result = pl.run(alone(sweep, number, state.member(number)))
                assert differing(result, end.member(number)) is None, (event, state.timestamp.batch, number)


@KINDS
def test_members_come_apart_and_together_again_bitwise(kind: str) -> None:
    """At each event, inside batches too."""
    sweep = of_kind(kind)
    for event, state in together(sweep):
        states = [state.member(number) for number in range(state.members)]
        assert [differences(a, b) for a, b in zip(states, split(state), strict=True)] == [[]] * 3
        if event in BOUNDARIES:
            again = pl.stack(states)
            assert differences(again, state, without=BATCHES | {"ensemble", "seed"}) == [], event
            assert [item.seed for item in split(again)] == [item.seed for item in states]
        chosen = state.members([2, 0])
        assert chosen.members == 2
        for place, number in enumerate([2, 0]):
            assert differences(chosen.member(place), states[number]) == [], event


def test_a_fork_of_some_members_is_a_run_of_its_own() -> None:
    """From the boundary of the first epoch, with other rates: each is the fork of its member alone."""
    sweep = everything()
    state = next(state for event, state in together(sweep) if event is Event.EPOCH_CHECKPOINT)

    def settings(pick: Pick) -> dict[str, Any]:
        return {"optimizer": pl.optim.adamw(lr=pick([0.02, 0.01]), eps=1e-3), "max_duration": "3ep"}

    fork = attrs.evolve(sweep, settings=settings, seeds=(9, 7))
    end = pl.run(together(fork, state.members([2, 0]), algorithms=[], strict=False))
    for place, number in enumerate([2, 0]):
        wanted = pl.run(alone(fork, place, state.member(number), algorithms=[], strict=False))
        assert differing(end.member(place), wanted) is None


# Ensembles that are wrong in one way each.


def one_mask(patch: pytest.MonkeyPatch) -> None:
    """All members draw by the seed of the first."""
    drawn = members.MemberMapping.drawn
    wrong = lambda self, *rest: drawn(attrs.evolve(self, seeds=self.seeds[:1] * self.count), *rest)  # noqa: E731
    patch.setattr(members.MemberMapping, "drawn", wrong)


def one_rate(patch: pytest.MonkeyPatch) -> None:
    """All members have the numbers of the first."""
    of_all = members.MemberScalar.set

    def wrong(self: members.MemberScalar, env: Any) -> None:
        of_all(self, env)
        self.tensor.fill_(self.tensor[0].item())

    patch.setattr(members.MemberScalar, "set", wrong)


def lost_memory(patch: pytest.MonkeyPatch) -> None:
    """Where States are put together, all have the momentum of the first."""
    field = stacking._stacked_field

    def wrong(name: str, values: list[Any], *rest: Any) -> Any:
        return field(name, values[:1] * len(values) if name == "opt_state" else values, *rest)

    patch.setattr(stacking, "_stacked_field", wrong)


WRONG = {"one mask": (one_mask, None), "one rate": (one_rate, None), "lost memory": (lost_memory, "loop")}


@pytest.mark.parametrize("name", WRONG)
def test_the_law_finds_an_ensemble_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wrong, fallback = WRONG[name]
    settings = lambda pick: {"optimizer": OPTIMIZERS["sgd"](pick), "max_duration": "3ba"}  # noqa: E731
    sweep = Sweep(mlp, batches("mlp", (4, 4)), settings, (1, 2), {"fallback": fallback})
    assert_alike(sweep)
    make_wrong(monkeypatch)
    with pytest.raises(AssertionError):
        assert_alike(sweep)
