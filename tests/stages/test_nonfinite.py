"""A loss or gradient that is NaN or infinite: found, named, or skipped and counted; never hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import same
from pure_loop.stages import nonfinite as searched
from tests.support.models import batches, mlp, plain
from tests.support.streams import assert_same, assert_same_stream, leaves

DATA = batches((4, 4, 4), seed=5)
BAD = 4  # in the second epoch, batch 1 in it
PRECISIONS = ["fp32", "amp_fp16"]


def module(make: Callable[[], nn.Module] = plain) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def fit(start: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.adamw(lr=0.01),
        "max_duration": "6ba",
        **changes,
    }
    return pl.fit(module() if start is None else start, DATA, **arguments)


def only_at(batch: int, change: Callable[[pl.State], pl.State], event: Event) -> pl.Algorithm:
    def apply(state: pl.State) -> pl.State:
        return change(state) if state.timestamp.batch == batch else state

    return pl.algorithm(event, name="spoil")(apply)


def scaled_loss(factor: float) -> pl.Algorithm:
    return only_at(BAD, lambda state: state.replace(loss=state.loss * factor), Event.AFTER_LOSS)


def root_at_zero(state: pl.State) -> pl.State:
    """Adds 0, whose gradient is 0 * infinity."""
    weight = state.params["0.weight"]
    return state.replace(loss=state.loss + (weight - weight.detach()).abs().sum().sqrt())


def nan_gradient(state: pl.State) -> pl.State:
    return state.replace(grads={**state.grads, "0.weight": torch.full_like(state.grads["0.weight"], math.nan)})


SPOILERS = {
    "nan loss": (scaled_loss(math.nan), "the loss is nan"),
    "inf loss": (scaled_loss(math.inf), "the loss is inf"),
    "nan gradient": (only_at(BAD, root_at_zero, Event.AFTER_LOSS), "the gradient of '0.weight'"),
    "an algorithm's": (only_at(BAD, nan_gradient, Event.AFTER_TRAIN_BATCH), "the gradient of '0.weight'"),
}


@pytest.mark.parametrize("kind", SPOILERS)
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_the_error_names_the_batch(kind: str, microbatch_size: int | None) -> None:
    spoil, says = SPOILERS[kind]
    pairs: list[tuple[Event, pl.State]] = []
    with pytest.raises(pl.NonFiniteError) as caught:
        pairs.extend(fit(algorithms=[spoil], microbatch_size=microbatch_size))
    assert isinstance(caught.value, FloatingPointError)
    message = str(caught.value)
    assert message.startswith(f"batch {BAD} (epoch 1, batch 1 in it)")
    assert says in message
    assert 'nonfinite="skip"' in message
    assert ("clip_grad" in message) == ("gradient" in says)  # else there is nothing to clip
    event, state = pairs[-1]
    assert event is Event.AFTER_TRAIN_BATCH
    assert state.timestamp.batch == BAD
    assert all(torch.isfinite(p).all() for p in state.params.values())


@pytest.mark.parametrize("kind", ["nan loss", "inf loss"])
def test_a_loss_that_is_not_finite_is_no_overflow(kind: str) -> None:
    """Half precision leaves out steps whose gradients overflow; a loss that is NaN by itself is still an error."""
    with pytest.raises(pl.NonFiniteError, match=rf"batch {BAD} .epoch 1"):
        pl.run(fit(algorithms=[SPOILERS[kind][0]], precision="amp_fp16"))


@pytest.mark.parametrize("kind", SPOILERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_skipping_leaves_the_step_out_and_counts_it(kind: str, precision: str) -> None:
    changes = {"algorithms": [SPOILERS[kind][0]], "precision": precision, "nonfinite": "skip"}
    pairs = list(fit(**changes))
    assert [event for event, _ in pairs] == [event for event, _ in fit(precision=precision)]
    ends = [state for event, state in pairs if event is Event.BATCH_END]
    assert [int(state.skipped) for state in ends] == [0] * BAD + [1] * (6 - BAD)
    before, after = ends[BAD - 1], ends[BAD]
    for field in ("params", "opt_state"):
        assert_same(leaves(getattr(after, field)), leaves(getattr(before, field)), field)
    assert after.timestamp.batch == BAD + 1
    assert not torch.equal(ends[-1].params["0.weight"], after.params["0.weight"]), "training resumes"
    ends[-1].check_finite()
    if precision == "amp_fp16":
        assert float(after.loss_scale) == float(before.loss_scale) / 2


def test_skipping_differs_from_not_having_the_batch_only_in_what_is_counted() -> None:
    def run(data: list[Any], algorithms: Any = ()) -> pl.State:
        stream = pl.fit(
            module(),
            data,
            loss=functional.cross_entropy,
            optimizer=pl.optim.adamw(lr=0.01),
            max_duration="1ep",
            nonfinite="skip",
            algorithms=algorithms,
        )
        return pl.run(stream)

    bad = (torch.full_like(DATA[0][0], math.nan), DATA[0][1])
    with_bad, without = leaves(run([DATA[0], bad, DATA[1], DATA[2]])), leaves(run(DATA))
    assert with_bad.keys() == without.keys()
    different = {path for path in with_bad if not same(with_bad[path], without[path])}
    assert {path for path in different if "timestamp" not in path} == {"skipped"}
    assert {"timestamp.batch", "timestamp.sample"} <= different


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumption_is_exact_around_a_skipped_batch(precision: str) -> None:
    changes = {"algorithms": [SPOILERS["nan loss"][0]], "precision": precision, "nonfinite": "skip"}
    whole = list(fit(**changes))
    for index in [i for i, (event, _) in enumerate(whole) if event is Event.BATCH_END][BAD - 1 : BAD + 1]:
        assert_same_stream(list(fit(whole[index][1], **changes))[1:], whole[index + 1 :], f"from {index}")


def test_a_skipped_batch_leaves_no_trace_in_batch_statistics() -> None:
    """A batch that is NaN makes running means NaN for good, in which every evaluation would end."""
    state = pl.run(fit(module(mlp), nonfinite="skip", algorithms=[SPOILERS["nan loss"][0]]))
    assert int(state.buffers["1.num_batches_tracked"]) == 5


def test_a_gradient_that_the_optimizer_hides_is_found() -> None:
    """Rprop looks at signs: an infinite gradient makes a finite step."""
    explode = pl.algorithm(Event.AFTER_TRAIN_BATCH, name="explode")(
        lambda state: state.replace(grads={name: gradient * math.inf for name, gradient in state.grads.items()})
    )
    with pytest.raises(pl.NonFiniteError, match="batch 0 "):
        pl.run(fit(optimizer=pl.optim.from_torch(torch.optim.Rprop, lr=0.1), algorithms=[explode]))


@pytest.mark.parametrize("options", [{}, {"donate": False}, {"strict": True}], ids=["auto", "copies", "strict"])
@pytest.mark.parametrize("clip_grad", [None, 1.0])
def test_an_algorithm_may_repair_gradients(options: dict[str, Any], clip_grad: float | None) -> None:
    """Their norm, which was measured before, does not count against those that it puts in."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def repair(state: pl.State) -> pl.State:
        return state.replace(grads={name: grad.nan_to_num(0.0) for name, grad in state.grads.items()})

    spoil = only_at(BAD, root_at_zero, Event.AFTER_LOSS)
    final = pl.run(fit(algorithms=[spoil, repair], clip_grad=clip_grad, **options))
    assert all(torch.isfinite(tensor).all() for tensor in final.params.values())
    with pytest.raises(pl.NonFiniteError, match="the gradient of"):
        pl.run(fit(algorithms=[spoil], clip_grad=clip_grad, **options))


@pytest.mark.parametrize("options", [{}, {"donate": False}, {"strict": True}], ids=["auto", "copies", "strict"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "lamb"])
def test_a_parameter_without_a_gradient_may_be_infinite(optimizer: str, options: dict[str, Any]) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain()
            self.mask = nn.Parameter(torch.tensor([-math.inf, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    final = pl.run(fit(module(Masked), optimizer=getattr(pl.optim, optimizer)(lr=0.01), **options))
    assert final.params["mask"].tolist() == [-math.inf, 1.0]


def test_an_update_that_overflows_is_found() -> None:
    with pytest.raises(pl.NonFiniteError, match=r"batch 0 .*finite.*the optimizer's step made parameters"):
        pl.run(fit(optimizer=pl.optim.sgd(lr=1e39)))


def test_losses_in_a_dict() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        part = functional.cross_entropy(outputs, targets)
        return {"total": part * math.inf, "part": part}

    with pytest.raises(pl.NonFiniteError, match=r"batch 0 .*the loss is inf"):
        pl.run(fit(loss=loss))


def test_check_finite() -> None:
    state = pl.State.create(module())
    state.check_finite()
    state.replace(nonfinite=None).check_finite()
    bad = state.replace(nonfinite=torch.tensor(7))
    with pytest.raises(pl.NonFiniteError, match=r"batch 7 was NaN or infinite .noticed at batch 0.") as caught:
        bad.check_finite()
    assert 'nonfinite="skip"' in str(caught.value)


# On a device the flag is only noted, so that the step waits for nothing. ----------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPOILERS)
def test_on_a_device_the_batch_is_noted_and_raised_when_asked(kind: str) -> None:
    """Noted in the step, without waiting for the device; raised at the end of the epoch at the latest."""
    states: list[pl.State] = []

    def collect() -> None:
        for event, state in fit(algorithms=[SPOILERS[kind][0]], device="cuda"):
            if event is Event.BATCH_END:
                states.append(state)

    with pytest.raises(pl.NonFiniteError, match=rf"batch {BAD} "):
        collect()
    noted = [int(state.nonfinite) for state in states]
    assert noted == ([-1] * BAD + [BAD] * (6 - BAD))[: len(noted)]
    with pytest.raises(pl.NonFiniteError, match=rf"batch {BAD} "):
        states[-1].check_finite()


@pytest.mark.gpu
def test_on_a_device_the_first_batch_is_named() -> None:
    spoil = pl.algorithm(Event.AFTER_LOSS, name="spoil")(lambda s: s.replace(loss=s.loss * math.nan))
    with pytest.raises(pl.NonFiniteError, match="of batch 0 "):
        pl.run(fit(algorithms=[spoil], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPOILERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_device_skipping_is_the_same(kind: str, precision: str) -> None:
    changes = {"algorithms": [SPOILERS[kind][0]], "precision": precision, "nonfinite": "skip", "device": "cuda"}
    ends = [state for event, state in fit(**changes) if event is Event.BATCH_END]
    assert [int(state.skipped) for state in ends] == [0] * BAD + [1] * (6 - BAD)
    for field in ("params", "opt_state"):
        assert_same(leaves(getattr(ends[BAD], field)), leaves(getattr(ends[BAD - 1], field)), field)
    ends[-1].check_finite()


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_under_another_default_dtype_a_loop_trains_as_ever(nonfinite: str) -> None:
    wanted = list(fit(nonfinite=nonfinite))
    start = module()
    torch.set_default_dtype(torch.float64)
    try:
        found = list(fit(start, nonfinite=nonfinite))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_stream(found, wanted, nonfinite)


def test_the_one_of_a_device_is_made_once_and_that_of_a_trace_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searched, "_ones", {})
    loss, wrong = torch.tensor(1.0), torch.tensor(math.nan)
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        searched.find_nonfinite(mode.from_tensor(loss), [])
    assert searched._ones == {}
    assert searched.find_nonfinite(loss, [torch.ones(2)]).item() == 0.0
    (one,) = searched._ones.values()
    assert type(one) is torch.Tensor
    assert searched.find_nonfinite(wrong, []).item() == 1.0
    assert searched._ones == {torch.device("cpu"): one}
    assert one.item() == 1.0


@pytest.mark.gpu
def test_on_a_device_an_overflow_is_no_error() -> None:
    def explode(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss + 1e36 * sum((p * p).sum() for p in state.params.values()))

    spoil = only_at(BAD, explode, Event.AFTER_LOSS)
    state = pl.run(fit(algorithms=[spoil], precision="amp_fp16", device="cuda"))
    state.check_finite()
    assert int(state.skipped) == 1
    assert float(state.loss_scale) == 2.0**15


@pytest.mark.gpu
def test_on_a_device_a_nan_loss_under_a_loss_scale_is_no_overflow() -> None:
    states = []
    with pytest.raises(pl.NonFiniteError, match=rf"of batch {BAD} "):  # noqa: PT012 - it is the loop that fails
        for _, state in fit(algorithms=[SPOILERS["nan loss"][0]], precision="amp_fp16", device="cuda"):
            states.append(state)
    assert int(states[-1].nonfinite) == BAD
