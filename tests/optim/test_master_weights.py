"""Float32 copies of half-precision parameters: the optimizer on float32, rounded, whatever else changes parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentTypeError, ResumeError
from pure_loop.optim import adamw, from_torch, lion, master_weights, partition, sgd
from pure_loop.time import Timestamp
from tests.support.optimizing import assert_same, named
from tests.support.tiers import examples

mse = nn.functional.mse_loss
LR = pl.schedules.linear(0.02, 0.01, "1dur")
OPTIMIZERS: dict[str, Callable[[], pl.optim.Optimizer]] = {
    "adamw": lambda: adamw(LR, weight_decay=0.1),
    "sgd": lambda: sgd(0.05, momentum=0.9),
    "lion": lambda: lion(LR),
    "from_torch": lambda: from_torch(torch.optim.RMSprop, lr=LR),
    "partition": lambda: partition(
        {"a": adamw(LR), "b": sgd(0.05, momentum=0.9)}, label=lambda name, tensor: "ab"[tensor.ndim < 2]
    ),
}


class Mixed(nn.Module):
    """Parameters in half precision and in float32, as norms often are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5, dtype=torch.bfloat16), nn.LayerNorm(5)
        self.last = nn.Linear(5, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()  # type: ignore[no-any-return]


def model(mixed: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Mixed() if mixed else nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse(outputs.float(), targets)


def batches(mixed: bool = True) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 4, generator=g), torch.randn(6, 3, generator=g)) for _ in range(6)]
    return data if mixed else [(x.bfloat16(), y) for x, y in data]


def fit(start: Any, optimizer: pl.optim.Optimizer, mixed: bool = True, **options: Any) -> Any:
    return pl.fit(start, batches(mixed), loss=loss, optimizer=optimizer, max_duration="1ep", **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("donate", [False, "auto"])
def test_it_is_the_optimizer_on_float32_rounded(name: str, donate: Any) -> None:
    """Against the optimizer itself on float32 parameters, given the gradients that the half-precision model has."""
    for mixed in (True, False):
        inner, module = OPTIMIZERS[name](), model(mixed)
        wide = pl.FrozenDict({key: param.detach().float() for key, param in module.named_parameters()})
        memory, grads, seen = inner.init(wide), None, 0
        for event, state in fit(module, master_weights(OPTIMIZERS[name]()), mixed, donate=donate):
            if event is Event.AFTER_TRAIN_BATCH:
                grads = {key: gradient.float() for key, gradient in state.grads.items()}
                timestamp = state.timestamp
            elif event is Event.BATCH_END:
                wide, memory = inner.update(grads, memory, wide, timestamp)
                for key, param in state.params.items():
                    assert torch.equal(param, wide[key].to(param.dtype)), key
                assert_same(state.opt_state["inner"], memory)
                seen += 1
            del state
        assert seen == 6


@examples(30, 500)
@given(
    ulps=st.integers(-300, 300),
    steps=st.integers(1, 40),
    start=st.sampled_from([1.0, -1.5, 1.25, -1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_small_updates_accumulate(ulps: int, steps: int, start: float, dtype: torch.dtype) -> None:
    """Updates of a power of two add up without an error, however small they are beside the parameter's spacing."""
    size = 2.0**-18
    optimizer = master_weights(sgd(lr=size))
    params = named([torch.full((3,), start, dtype=dtype)])
    memory, alone = optimizer.init(params), params
    gradient = named([torch.full((3,), float(ulps), dtype=dtype)])
    for batch in range(steps):
        params, memory = optimizer.update(gradient, memory, params, Timestamp(batch=batch))
        alone, _ = sgd(lr=size).update(gradient, pl.FrozenDict(), alone, Timestamp(batch=batch))
    total = start - size * steps * float(gradient["p0"][0])
    assert torch.equal(memory["master"]["p0"], torch.full((3,), total))
    assert torch.equal(params["p0"], torch.full((3,), total).to(dtype))
    if abs(ulps) * size < torch.finfo(dtype).eps / 5:
        assert torch.equal(alone["p0"], torch.full((3,), start, dtype=dtype))  # which is what copies are for


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes(name: str, tmp_path: Path) -> None:
    def make() -> pl.optim.Optimizer:
        return master_weights(OPTIMIZERS[name]())

    kept = [state for event, state in fit(model(), make()) if event is Event.BATCH_END]
    last = kept[-1]
    pl.save(kept[2], tmp_path / "x.safetensors")
    loaded = pl.load(tmp_path / "x.safetensors", model=model())
    for start in (kept[0], kept[4], loaded):
        resumed = pl.run(fit(start, make()))
        assert_same(resumed.params, last.params)
        assert_same(resumed.opt_state, last.opt_state)
    assert_same(pl.run(fit(model(), make(), load_path=tmp_path / "x.safetensors")).opt_state, last.opt_state)


def test_what_an_algorithm_writes_to_parameters_holds() -> None:
    """A copy begins again from what something else has written to its parameter; others keep their digits."""

    @pl.algorithm(Event.BATCH_END)
    def halved(state: pl.State) -> pl.State:
        if state.timestamp.batch != 3:
            return state
        weight = state.params["first.weight"].clone()
        weight[0] = 0.5 * weight[0]
        return state.replace(params={**state.params, "first.weight": weight})

    states = [s for event, s in fit(model(), master_weights(sgd(0.0)), algorithms=[halved]) if event is Event.BATCH_END]
    before, after, last = states[1], states[2], states[3]
    assert torch.equal(after.params["first.weight"][0], 0.5 * before.params["first.weight"][0])
    assert_same(last.params, after.params)
    master = last.opt_state["master"]["first.weight"]
    assert torch.equal(master[0], after.params["first.weight"][0].float())
    assert torch.equal(master[1:], before.opt_state["master"]["first.weight"][1:])


@pytest.mark.parametrize("name", ["adamw", "sgd", "partition"])
def test_steps_in_place_are_the_same(name: str) -> None:
    """``overwrite`` writes to the tensors that it was given, and gives what ``update`` gives."""
    optimizer = master_weights(OPTIMIZERS[name]())
    assert optimizer.overwrite is not None
    g = torch.Generator().manual_seed(0)
    params = named([torch.randn(shape, generator=g).bfloat16() for shape in ((3, 4), (4,))])
    steps = [named([torch.randn(p.shape, generator=g).bfloat16() for p in params.values()]) for _ in range(4)]
    memory = optimizer.init(params)
    mine = pl.FrozenDict({key: param.clone() for key, param in params.items()})
    kept = optimizer.init(mine)
    for batch, grads in enumerate(steps):
        timestamp = Timestamp(batch=batch, max_duration=pl.Time.parse("4ba"))
        params, memory = optimizer.update(grads, memory, params, timestamp)
        places = [param.data_ptr() for param in mine.values()]
        before = mine
        mine, kept = optimizer.overwrite(grads, kept, mine, timestamp)
        assert_same(mine, params)
        assert_same(kept, memory)
        assert mine is before
        assert [param.data_ptr() for param in mine.values()] == places


@pytest.mark.parametrize("donate", [False, "auto"])
def test_a_model_in_float32_trains_as_without_it(donate: Any) -> None:
    module, data = nn.Linear(4, 3), batches()
    settings: dict[str, Any] = {"loss": mse, "max_duration": "1ep", "donate": donate}
    plain = pl.run(pl.fit(module, data, optimizer=adamw(LR), **settings))
    wrapped = pl.run(pl.fit(module, data, optimizer=master_weights(adamw(LR)), **settings))
    assert_same(wrapped.params, plain.params)
    assert_same(wrapped.opt_state["inner"], plain.opt_state)


@pytest.mark.usefixtures("interpreted")
def test_it_is_compiled() -> None:
    optimizer = master_weights(adamw(LR))
    eager = pl.run(fit(model(), optimizer, watch={Event.BATCH_END}))
    compiled = pl.run(fit(model(), optimizer, compile=True, watch={Event.BATCH_END}))
    for name, value in eager.opt_state["master"].items():
        torch.testing.assert_close(compiled.opt_state["master"][name], value, rtol=2e-2, atol=2e-3)


def test_a_gradient_that_overflows_its_scale_changes_nothing() -> None:
    module = model(False).half()
    data = [(x.half(), 100 * y) for x, y in batches(False)]
    optimizer = master_weights(adamw(0.01))
    stream = pl.fit(module, data, loss=loss, optimizer=optimizer, max_duration="1ep", precision="amp_fp16")
    seen = 0
    for event, state in stream:
        if event is Event.AFTER_TRAIN_BATCH:
            before = state
        elif event is Event.BATCH_END and int(state.skipped) > int(before.skipped):
            assert_same(state.opt_state, before.opt_state)
            assert_same(state.params, before.params)
            seen += 1
    assert seen


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"master_weights needs an optimizer, got .*master_weights\(pl\.optim"):
        master_weights(torch.optim.AdamW)  # type: ignore[arg-type]
    assert repr(master_weights(sgd(0.1))).startswith("master_weights(sgd)(lr=0.1, momentum=0.0")
    state = pl.run(fit(model(), master_weights(adamw(0.01))))
    with pytest.raises(ResumeError, match=r"another optimizer than adamw: it holds master, inner"):
        fit(state, adamw(0.01))
    with pytest.raises(ResumeError, match=r"another optimizer than sgd"):
        fit(state, master_weights(sgd(0.01, momentum=0.9)))
    plain = pl.run(fit(model(), adamw(0.01)))
    with pytest.raises(ResumeError, match=r"another optimizer than master_weights\(adamw\): it holds step"):
        fit(plain, master_weights(adamw(0.01)))
    wide = state.replace(params={name: param.float() for name, param in state.params.items()})
    with pytest.raises(ResumeError, match=r"copies of other parameters than the model has in half precision"):
        fit(wide, master_weights(adamw(0.01)))
    with pytest.raises(pl.errors.ArgumentError, match=r"no class of torch\.optim has the state of master_weights"):
        pl.optim.to_state_dict(state, master_weights(adamw(0.01)))
