"""Float32 copies of half-precision parameters: the optimizer on float32, rounded, whatever else changes parameters.

That an update is that, and in place as out of place, is asked in test_optim.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.optim import adamw, from_torch, master_weights, partition, sgd
from pure_loop.random import seeded
from tests.support import problem
from tests.support.optimizing import assert_same, ours

LR = pl.schedules.linear(0.02, 0.01, "1dur")
DATA = problem.points(6)


class Mixed(nn.Module):
    """Parameters in half precision and in float32, as norms often are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5, dtype=torch.bfloat16), nn.LayerNorm(5)
        self.last = nn.Linear(5, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()  # type: ignore[no-any-return]


def model() -> nn.Module:
    with seeded(2):
        return Mixed()


def fit(start: Any, optimizer: pl.optim.Optimizer, data: Any = DATA, algorithms: Any = (), **options: Any) -> Any:
    options = {"max_duration": "1ep", "strict": False, **options}
    return problem.fit(start, data, algorithms, optimizer=optimizer, **options)


def test_a_run_is_the_optimizer_on_float32_rounded_and_resumes(tmp_path: Path) -> None:
    """Against the optimizer itself on float32 parameters, given the gradients that the half-precision model has."""
    parts = {"a": adamw(LR, weight_decay=0.1), "b": sgd(0.05, momentum=0.9)}
    for inner in (from_torch(torch.optim.RMSprop, lr=LR), partition(parts, lambda name, p: "ab"[p.ndim < 2])):
        module, optimizer = model(), master_weights(inner)
        wide = pl.FrozenDict({key: param.detach().float() for key, param in module.named_parameters()})
        memory, grads, kept = inner.init(wide), dict[str, Any](), []
        for event, state in fit(module, optimizer):
            if event is Event.AFTER_TRAIN_BATCH:
                grads = {key: gradient.float() for key, gradient in state.grads.items()}
                timestamp = state.timestamp
            elif event is Event.BATCH_END:
                wide, memory = inner.update(grads, memory, wide, timestamp)
                problem.close(state.params, {key: wide[key].to(p.dtype) for key, p in state.params.items()}, 0.0)
                assert_same(state.opt_state["inner"], memory)
                kept.append(state)
        pl.save(kept[2], tmp_path / "x.safetensors")
        for start in (model(), kept[4], pl.load(tmp_path / "x.safetensors", model=model())):
            resumed = pl.run(fit(start, optimizer))
            assert_same((resumed.params, resumed.opt_state), (kept[-1].params, kept[-1].opt_state))


def test_updates_add_up_that_are_small_beside_the_spacing_of_a_dtype() -> None:
    """Without copies, the parameter stays as it is."""
    start, steps, plain = [torch.ones(3).bfloat16()], [[torch.ones(3).bfloat16()]] * 200, sgd(2.0**-14)
    (*_, (alone, _)), (*_, (params, memory)) = (ours(made, start, steps) for made in (plain, master_weights(plain)))
    assert torch.equal(alone["p0"], start[0])
    assert torch.equal(memory["master"]["p0"], torch.full((3,), 1 - 200 * 2.0**-14))
    assert torch.equal(params["p0"], memory["master"]["p0"].bfloat16())


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


@pytest.mark.usefixtures("interpreted")
def test_it_is_compiled_and_a_model_in_float32_trains_as_without_it() -> None:
    optimizer = master_weights(adamw(LR))
    eager, compiled = (pl.run(fit(model(), optimizer, compile=c, watch={Event.BATCH_END})) for c in (False, True))
    problem.close(compiled.opt_state["master"], eager.opt_state["master"], 1e-2)
    for donate in (False, "auto"):
        plain, wrapped = (pl.run(fit(None, each, donate=donate)) for each in (adamw(LR), optimizer))
        assert_same((wrapped.params, wrapped.opt_state["inner"]), (plain.params, plain.opt_state))


def test_a_gradient_that_overflows_its_scale_changes_nothing() -> None:
    loss = lambda outputs, targets: 1000 * problem.cross_entropy(outputs.float(), targets)  # noqa: E731
    seen, data = 0, [(x.half(), y) for x, y in DATA]
    for event, state in fit(problem.mlp().half(), master_weights(adamw(0.01)), data, loss=loss, precision="amp_fp16"):
        if event is Event.AFTER_TRAIN_BATCH:
            before = state
        elif event is Event.BATCH_END and int(state.skipped) > int(before.skipped):
            assert_same((state.opt_state, state.params), (before.opt_state, before.params))
            seen += 1
    assert seen
