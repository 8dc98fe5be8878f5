"""A loss or gradient that is NaN or infinite: found, named, or skipped and counted; never hidden."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import NonFiniteError
from pure_loop.stages import nonfinite as searched
from pure_loop.stages.nonfinite import gradients_nonfinite
from pure_loop.testing import differences
from tests.support import problem
from tests.support.streams import assert_same, assert_same_stream, leaves

DATA = problem.points(size=4, seed=5)
BAD = 4  # in the second epoch, batch 1 in it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    settings = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "6ba", "strict": None}
    return problem.fit(model, data, **settings | changes)


def only_at(batch: int, change: Callable[[pl.State], pl.State], event: Event) -> pl.Algorithm:
    apply = lambda state: change(state) if state.timestamp.batch == batch else state  # noqa: E731
    return pl.algorithm(event, name="spoil")(apply)


def root_at_zero(state: pl.State) -> pl.State:
    """Adds 0, whose gradient is 0 * infinity."""
    weight = state.params["0.weight"]
    return state.replace(loss=state.loss + (weight - weight.detach()).abs().sum().sqrt())


def with_gradients(change: Callable[[Tensor], Tensor]) -> Callable[[pl.State], pl.State]:
    return lambda state: state.replace(grads={name: change(grad) for name, grad in state.grads.items()})


SPOILERS = {
    "nan loss": (only_at(BAD, lambda s: s.replace(loss=s.loss * math.nan), Event.AFTER_LOSS), "the loss is nan"),
    "inf loss": (only_at(BAD, lambda s: s.replace(loss=s.loss * math.inf), Event.AFTER_LOSS), "the loss is inf"),
    "nan gradient": (only_at(BAD, root_at_zero, Event.AFTER_LOSS), "the gradient of '0.weight'"),
    "an algorithm's": (
        only_at(BAD, with_gradients(lambda grad: grad * math.nan), Event.AFTER_TRAIN_BATCH),
        "the gradient of '2.bias'",
    ),
}


@pytest.mark.parametrize("kind", SPOILERS)
def test_the_error_names_the_batch(kind: str) -> None:
    """Half precision leaves out steps whose gradients overflow; a loss that is NaN by itself is still an error."""
    spoil, says = SPOILERS[kind]
    for options in ({}, {"microbatch_size": 3}, *([{"precision": "amp_fp16"}] if "loss" in kind else [])):
        pairs: list[tuple[Event, pl.State]] = []
        with pytest.raises(NonFiniteError) as caught:
            pairs.extend(fit(algorithms=[spoil], **options))
        assert isinstance(caught.value, FloatingPointError)
        message = str(caught.value)
        assert message.startswith(f"batch {BAD} (epoch 1, batch 1 in it)")
        assert says in message
        assert 'nonfinite="skip"' in message
        assert ("clip_grad" in message) == ("gradient" in says)  # else there is nothing to clip
        event, state = pairs[-1]
        assert (event, state.timestamp.batch) == (Event.AFTER_TRAIN_BATCH, BAD)
        assert all(torch.isfinite(p).all() for p in state.params.values())


@pytest.mark.parametrize("device", DEVICES)
def test_skipping_leaves_the_step_out_and_counts_it(device: str) -> None:
    """No trace is in batch statistics: one NaN in a running mean would stay. And training resumes around it."""
    wanted = [event for event, _ in fit("noisy")]
    for spoil, _ in SPOILERS.values():
        changes = {"algorithms": [spoil], "nonfinite": "skip", "device": device}
        pairs = list(fit("noisy", **changes))
        assert [event for event, _ in pairs] == wanted
        ends = [i for i, (event, _) in enumerate(pairs) if event is Event.BATCH_END]
        states = [pairs[i][1] for i in ends]
        assert [int(state.skipped) for state in states] == [0] * BAD + [1] * (6 - BAD)
        for field in ("params", "opt_state", "buffers"):
            assert_same(leaves(getattr(states[BAD], field)), leaves(getattr(states[BAD - 1], field)), field)
        assert states[BAD].timestamp.batch == BAD + 1
        assert not torch.equal(states[-1].params["0.weight"], states[BAD].params["0.weight"]), "training resumes"
        states[-1].check_finite()
        assert int(states[-1].buffers["1.num_batches_tracked"]) == 5
        assert_same_stream(list(fit(states[BAD], **changes))[1:], pairs[ends[BAD] + 1 :], "from there")


def test_skipping_differs_from_not_having_the_batch_only_in_what_is_counted() -> None:
    bad = (torch.full_like(DATA[0][0], math.nan), DATA[0][1])
    runs = [pl.run(fit(data=data, max_duration="1ep", nonfinite="skip")) for data in ([DATA[0], bad, *DATA[1:]], DATA)]
    found = {each.leaf.strip("[]'") for each in differences(*map(leaves, runs), name="")}
    assert {path for path in found if "timestamp" not in path} == {"skipped"}
    assert {"timestamp.batch", "timestamp.sample"} <= found


def infinite_in_parts(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    part = problem.cross_entropy(outputs, targets)
    return {"total": part * math.inf, "part": part}


def test_what_a_step_would_hide_is_found() -> None:
    """Rprop looks at signs: an infinite gradient makes a finite step."""
    infinite = pl.algorithm(Event.AFTER_TRAIN_BATCH, name="infinite")(with_gradients(lambda grad: grad * math.inf))
    hides = {"optimizer": pl.optim.from_torch(torch.optim.Rprop, lr=0.1), "algorithms": [infinite]}
    with pytest.raises(NonFiniteError, match=r"batch 0 .*gradient"):
        pl.run(fit(**hides))
    with pytest.raises(NonFiniteError, match=r"batch 0 .*the loss is inf"):
        pl.run(fit(loss=infinite_in_parts))


class Masked(nn.Module):
    """With a parameter that no gradient reaches, and which is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mask = problem.mlp(), nn.Parameter(torch.tensor([-math.inf, 1.0]))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


HOW = [{}, {"donate": False}, {"strict": True}]


def test_an_algorithm_may_repair_gradients_and_a_parameter_without_one_may_be_infinite() -> None:
    """Their norm, which was measured before, does not count against those that it puts in."""
    repair = pl.algorithm(Event.AFTER_TRAIN_BATCH, name="repair")(with_gradients(lambda grad: grad.nan_to_num(0.0)))
    spoil = only_at(BAD, root_at_zero, Event.AFTER_LOSS)
    for options, clip_grad in itertools.product(HOW, (None, 1.0)):
        final = pl.run(fit(algorithms=[spoil, repair], clip_grad=clip_grad, **options))
        assert all(torch.isfinite(tensor).all() for tensor in final.params.values())
        with pytest.raises(NonFiniteError, match="the gradient of"):
            pl.run(fit(algorithms=[spoil], clip_grad=clip_grad, **options))
    for options, optimizer in itertools.product(HOW, (pl.optim.adamw, pl.optim.sgd, pl.optim.lamb)):
        final = pl.run(fit(Masked(), optimizer=optimizer(lr=0.01), **options))
        assert final.params["mask"].tolist() == [-math.inf, 1.0]


def test_check_finite() -> None:
    state = pl.State.create(problem.mlp())
    state.check_finite()
    state.replace(nonfinite=None).check_finite()
    with pytest.raises(NonFiniteError, match=r"batch 7 was NaN or infinite .noticed at batch 0.*nonfinite=.skip"):
        state.replace(nonfinite=torch.tensor(7)).check_finite()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPOILERS)
def test_on_a_device_the_batch_is_noted_and_raised_when_asked(kind: str) -> None:
    """Noted in the step, without waiting for the device; raised at the end of the epoch at the latest."""
    states: list[pl.State] = []
    for precision in ("fp32", *(["amp_fp16"] if kind == "nan loss" else [])):
        states.clear()
        with pytest.raises(NonFiniteError, match=rf"of batch {BAD} "):  # noqa: PT012 - it is the loop that fails
            for event, state in fit(algorithms=[SPOILERS[kind][0]], device="cuda", precision=precision):
                states += [state] if event is Event.BATCH_END else []
        assert [int(state.nonfinite) for state in states] == ([-1] * BAD + [BAD] * (6 - BAD))[: len(states)]
        with pytest.raises(NonFiniteError, match=rf"batch {BAD} "):
            states[-1].check_finite()
    always = pl.algorithm(Event.AFTER_LOSS, name="spoil")(lambda s: s.replace(loss=s.loss * math.nan))
    with pytest.raises(NonFiniteError, match="of batch 0 "):
        pl.run(fit(algorithms=[always], device="cuda"))


def test_under_another_default_dtype_a_loop_trains_as_ever() -> None:
    for nonfinite in ("error", "skip"):
        wanted, start = list(fit(nonfinite=nonfinite)), problem.mlp()
        torch.set_default_dtype(torch.float64)
        try:
            found = list(fit(start, nonfinite=nonfinite))
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same_stream(found, wanted, nonfinite)


# What is looked at, and what an optimizer does with `found_inf`.


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


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
_NUMBERS = st.builds(
    lambda numbers, dtype: torch.tensor(numbers, dtype=dtype),
    st.lists(st.sampled_from([0.0, -1.5, 6e4, math.inf, -math.inf, math.nan]), max_size=4),
    st.sampled_from(DTYPES),
)


@given(grads=st.lists(_NUMBERS, max_size=4), loss=st.sampled_from([0.5, math.nan, -math.inf]))
def test_it_finds_what_is_not_finite(grads: list[Tensor], loss: float) -> None:
    before, versions = [each.clone() for each in grads], [each._version for each in grads]
    found = gradients_nonfinite(torch.tensor(loss), grads)
    assert (found.dtype, found.shape) == (torch.float32, (1,))
    finite = math.isfinite(loss) and all(bool(torch.isfinite(each).all()) for each in grads)
    assert found.item() == (not finite)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(grads, before, strict=True))
    assert [each._version for each in grads] == versions
    assert searched.find_nonfinite(torch.tensor(loss), before).item() == (not finite)


def _sparse(indices: list[int], values: list[Any]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), (3,), check_invariants=True)


def test_large_numbers_and_sparse_ones() -> None:
    conjugate = torch.tensor([1j, complex(0, math.inf)]).conj()
    finite = [[torch.tensor([1.5e308, 1.5e308], dtype=torch.float64), torch.ones(2)], [conjugate[:1]]]
    finite += [[torch.tensor([2**40]), torch.tensor([True])], [_sparse([1], [2.0])]]
    # Twice the same place: each is finite, and what they add up to is not.
    twice, nan = _sparse([1, 1], [3e38, 3e38]), _sparse([1], [math.nan])
    for tensors in (*finite, [conjugate], [nan.to(torch.complex64)], [twice], [torch.ones(2), nan]):
        assert gradients_nonfinite(torch.tensor(1.0), tensors).item() == all(tensors is not each for each in finite)


def test_an_optimizer_that_takes_found_inf_writes_nothing_where_it_is_1() -> None:
    parts = {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9)}
    partition = pl.optim.partition(parts, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b")
    optimizers: list[Any] = [*parts.values(), partition, pl.optim.sgd(lr=0.1), pl.optim.lion(lr=0.1)]
    assert sum(each.takes_found_inf for each in optimizers) > 2
    for optimizer in (each for each in optimizers if each.takes_found_inf):
        state = pl.run(fit(optimizer=optimizer))
        grads = pl.FrozenDict({name: torch.ones_like(each) for name, each in state.params.items()})
        given = [(grads, *copy.deepcopy((state.opt_state, state.params)), state.timestamp) for _ in range(4)]
        expected, (_, memory, params, _) = optimizer.update(*given[0]), given[1]
        assert_same(optimizer.overwrite(*given[2], found_inf=torch.ones(1)), (params, memory), "left out")
        done = optimizer.overwrite(*given[3], found_inf=torch.zeros(1))
        assert done[0] is given[3][2], "in place"
        assert_same(done, expected, "written")


class Complex(nn.Module):
    """Its gradient has the conjugate bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).abs()


def test_complex_gradients() -> None:
    adam = pl.optim.from_torch(torch.optim.Adam, lr=0.1)
    for nonfinite, optimizer in itertools.product(("error", "skip"), (pl.optim.adamw(lr=0.1), adam)):
        loss = lambda outputs, targets: outputs.mean()  # noqa: E731
        assert int(pl.run(fit(Complex(), loss=loss, optimizer=optimizer, nonfinite=nonfinite)).skipped) == 0
