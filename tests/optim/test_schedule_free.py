"""Classes with weights for training and others for evaluation: the class by hand, in both modes, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.optim import evaluation_params, from_torch, master_weights, partition, to_state_dict

schedulefree: Any = pytest.importorskip("schedulefree")
mse = nn.functional.mse_loss
BATCHES = 20
CLASSES = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreePaper"]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def batches(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=g), torch.randn(4, 4, generator=g)) for _ in range(count)]


def fit(start: Any, optimizer: pl.optim.Optimizer, **options: Any) -> Any:
    return pl.fit(start, batches(), loss=mse, optimizer=optimizer, max_duration="1ep", **options)


def options_of(name: str) -> dict[str, Any]:
    return {"lr": 0.05} if name.startswith("RAdam") else {"lr": 0.05, "warmup_steps": 3}


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_class_in_both_modes_and_resumes(name: str, tmp_path: Path) -> None:
    cls, options = getattr(schedulefree, name), options_of(name)
    module = model()
    hand = cls(module.parameters(), **options)
    trained, evaluated, losses = [], [], []
    for number, (inputs, targets) in enumerate(batches()):
        hand.train()
        mse(module(inputs), targets).backward()
        hand.step()
        hand.zero_grad()
        trained.append([param.detach().clone() for param in module.parameters()])
        if number in (4, BATCHES - 1):  # to change between the modes rounds the weights for training
            hand.eval()
            evaluated.append([param.detach().clone() for param in module.parameters()])
            losses.append(mse(module(inputs), targets).item())
            for param, value in zip(module.parameters(), trained[-1], strict=True):
                param.data.copy_(value)
            hand.param_groups[0]["train_mode"] = True
    optimizer = from_torch(cls, **options)

    @pl.algorithm(Event.EVAL_START)
    def averages(state: pl.State) -> pl.State:
        return state.replace(params=evaluation_params(state, optimizer))

    kept = [s for event, s in fit(model(), optimizer) if event is Event.BATCH_END]
    for state, expected in zip(kept, trained, strict=True):
        for param, value in zip(state.params.values(), expected, strict=True):
            assert torch.equal(param, value)
    for point, expected, loss in zip((4, BATCHES - 1), evaluated, losses, strict=True):
        params = evaluation_params(kept[point], optimizer)
        for param, value in zip(params.values(), expected, strict=True):
            assert torch.equal(param, value)
        held = {"held": [batches()[point]]}
        watched = pl.evaluate(kept[point], held, loss=mse, algorithms=[averages])
        assert float(pl.run(watched).metrics["held"]["loss"]) == pytest.approx(loss, rel=1e-6)
    assert not torch.equal(params["0.weight"], kept[-1].params["0.weight"])
    pl.save(kept[6], tmp_path / "x.safetensors")
    for start in (kept[6], pl.load(tmp_path / "x.safetensors", model=model())):
        last = pl.run(fit(start, from_torch(cls, **options), evaluators=batches(2), algorithms=[averages]))
        for param, value in zip(last.params.values(), trained[-1], strict=True):
            assert torch.equal(param, value)


def test_a_layer_that_is_never_used_keeps_its_place() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    optimizer = from_torch(schedulefree.SGDScheduleFree, lr=0.1)
    kept = [s for event, s in fit(Half(), optimizer) if event is Event.BATCH_END]
    structure = optree.tree_structure(optimizer.init(kept[-1].params), namespace="pure_loop")
    assert optree.tree_structure(kept[-1].opt_state, namespace="pure_loop") == structure
    assert torch.equal(pl.run(fit(kept[3], optimizer)).params["used.weight"], kept[-1].params["used.weight"])
    params = evaluation_params(kept[-1], optimizer)
    assert torch.equal(params["unused.weight"], kept[-1].params["unused.weight"])


def test_parts_have_modes_of_their_own() -> None:
    parts = {"w": from_torch(schedulefree.AdamWScheduleFree, lr=0.1), "b": pl.optim.sgd(0.1)}
    optimizer = partition(parts, label=lambda name, tensor: "b" if tensor.ndim < 2 else "w")
    state = pl.run(fit(model(), optimizer))
    params = evaluation_params(state, optimizer)
    assert list(params) == list(state.params)
    assert torch.equal(params["0.bias"], state.params["0.bias"])
    assert not torch.equal(params["0.weight"], state.params["0.weight"])


def test_what_has_no_modes_is_refused() -> None:
    for optimizer in (pl.optim.sgd(0.1), from_torch(torch.optim.SGD, lr=0.1), pl.optim.lion()):
        state = pl.run(fit(model(), optimizer))
        with pytest.raises(ArgumentError, match=r"has one set of parameters.*package schedulefree"):
            evaluation_params(state, optimizer)
    with pytest.raises(ResumeError, match="no optimizer state yet"):
        evaluation_params(pl.State.create(model()), from_torch(schedulefree.SGDScheduleFree))
    with pytest.raises(ArgumentError, match=r"AdamWScheduleFreeClosure can't be used, because .*step\(closure\)"):
        from_torch(schedulefree.AdamWScheduleFreeClosure)


class Quantized(torch.optim.SGD):
    """As torchao's optimizers of few bits say of themselves."""

    def _subclass_zeros(self) -> None: ...


def test_states_of_other_classes_of_tensors_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Quantized can't be used, .* tensors of classes of its own"):
        from_torch(Quantized)


def test_on_float32_copies_the_average_is_that_of_the_copies() -> None:
    inner = from_torch(schedulefree.AdamWScheduleFree, lr=0.05)
    optimizer = master_weights(inner)
    halves = [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in batches()]
    state = pl.run(pl.fit(model().bfloat16(), halves, loss=mse, optimizer=optimizer, max_duration="1ep"))
    copies = pl.State.create(model()).replace(params=state.opt_state["master"], opt_state=state.opt_state["inner"])
    expected = evaluation_params(copies, inner)
    params = evaluation_params(state, optimizer)
    assert {name: param.dtype for name, param in params.items()} == dict.fromkeys(params, torch.bfloat16)
    assert all(torch.equal(params[name], expected[name].bfloat16()) for name in params)
    assert any(not torch.equal(params[name], state.params[name]) for name in params)
    with pytest.raises(ArgumentError, match=r"no class of torch\.optim has the state of master_weights"):
        to_state_dict(state, optimizer)
    plain = master_weights(partition({"all": pl.optim.adamw()}, label=lambda name, tensor: "all"))
    state = pl.run(pl.fit(model().bfloat16(), halves, loss=mse, optimizer=plain, max_duration="1ba"))
    with pytest.raises(ArgumentError, match="has one set of parameters"):
        evaluation_params(state, plain)
