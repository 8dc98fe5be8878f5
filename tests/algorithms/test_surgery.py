"""All algorithms that change the model at INIT: names, the user's module, pickles, files, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms.blurpool import BlurConv2d
from tests.algorithms.layers import Residual, residual
from tests.support.problem import close, convnet, fit, images, noise, run
from tests.support.streams import equal

INPUTS = torch.randn(4, 3, 12, 12, generator=noise())


@attrs.frozen
class Surgery:
    """A function and its settings; ``new`` is part of the names of what is new, None: names change."""

    change: Callable[..., nn.Module]
    algorithm: Callable[..., pl.Algorithm]
    settings: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF008 - never changed
    same: bool = True
    new: str | None = ""
    already: str = "already"

    def changed(self, module: nn.Module) -> nn.Module:
        return self.change(module, *self.settings, **self.options)

    def made(self) -> pl.Algorithm:
        return self.algorithm(*self.settings, **self.options)


SURGERY = {
    "alibi": Surgery(A.apply_alibi, A.alibi, (8,), same=False),
    "blurpool": Surgery(A.apply_blurpool, A.blurpool, options={"min_channels": 4}, same=False),
    "channels_last": Surgery(A.apply_channels_last, A.channels_last, already=""),
    "factorize": Surgery(
        A.apply_factorize, A.factorize, (2,), {"min_features": 8}, same=False, new=None, already="nothing to change"
    ),
    "gated_linear_units": Surgery(
        *(A.apply_gated_linear_units, A.gated_linear_units, (torch.relu,), {"init": "old", "bias": True}),
        new="value",
        already="a gate already",
    ),
    "ghost_batchnorm": Surgery(A.apply_ghost_batchnorm, A.ghost_batchnorm, (2,)),
    "gyro_dropout": Surgery(A.apply_gyro_dropout, A.gyro_dropout),
    "low_precision_groupnorm": Surgery(A.apply_low_precision_groupnorm, A.low_precision_groupnorm),
    "low_precision_layernorm": Surgery(A.apply_low_precision_layernorm, A.low_precision_layernorm),
    "no_op_model": Surgery(A.apply_no_op_model, A.no_op_model, same=False, new=None, already=""),
    "squeeze_excite": Surgery(
        A.apply_squeeze_excite, A.squeeze_excite, (2,), {"min_channels": 4, "init": "identity"}, new="squeeze_excite"
    ),
    "stochastic_depth": Surgery(A.apply_stochastic_depth, A.stochastic_depth, (Residual, 0.3)),
    "weight_standardization": Surgery(A.apply_weight_standardization, A.weight_standardization, same=False),
}


@pytest.mark.parametrize("name", SURGERY)
def test_a_changed_copy_has_the_names_and_values_and_the_module_stays_as_it_was(name: str) -> None:
    """Evaluation begins as it was, if the method says so; copies and pickles compute the same."""
    surgery, module = SURGERY[name], residual()
    before, text = copy.deepcopy(module.state_dict()), str(module)
    changed = surgery.changed(module)
    equal(dict(module.state_dict()), dict(before))
    assert str(module) == text
    assert not any(layer._forward_hooks for layer in module.modules())
    if surgery.new is not None:
        kept = changed.state_dict()
        equal({key: kept[key] for key in before}, dict(before))
        missing, unexpected = changed.load_state_dict(before, strict=False)
        assert not unexpected, "pretrained weights fit"
        assert all(surgery.new and surgery.new in key for key in missing)
    with torch.no_grad():
        old, now = module.eval()(INPUTS), changed.eval()(INPUTS)
    assert torch.allclose(old, now, atol=1e-5) == surgery.same
    for twin in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        with torch.no_grad():
            assert torch.equal(twin(INPUTS), now)


@pytest.mark.parametrize("name", SURGERY)
def test_training_is_that_of_the_seed_and_resumes_from_a_file(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01), "strict": False}
    for event, state in fit(residual(), images(), [SURGERY[name].made()], donate=False, max_duration="3ba", **options):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
            pickle.loads(pickle.dumps(state))
            pl.save(state, tmp_path / "x.safetensors")
        if event is Event.BATCH_END and state.timestamp.batch == 1:
            first = state
    torch.manual_seed(99)
    equal(run(residual(), images(), [SURGERY[name].made()], max_duration="1ba", **options).params, first.params)
    options |= {"load_path": tmp_path / "x.safetensors", "max_duration": "3ba"}
    resumed = run(residual(), images(), [SURGERY[name].made()], **options)
    equal((resumed.params, resumed.buffers), (state.params, state.buffers))
    assert all(tensor.isfinite().all() for tensor in state.params.values())


@pytest.mark.parametrize("name", sorted(SURGERY.keys() - {"no_op_model"}))
def test_what_has_no_such_layers_is_refused(name: str) -> None:
    surgery = SURGERY[name]
    if name != "alibi":  # which sees in the first forward that there is no attention
        with pytest.raises(pl.ModelError, match=rf"{name}:? .*(to change|to replace) in Sequential"):
            surgery.changed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(pl.ArgumentTypeError, match=r"is not a torch\.nn\.Module"):
        surgery.change(3, *surgery.settings)
    if surgery.already:
        with pytest.raises(pl.ModelError, match=surgery.already):
            surgery.changed(surgery.changed(residual()))


@pytest.mark.parametrize(
    "change", [A.apply_weight_standardization, A.apply_ghost_batchnorm, A.apply_low_precision_layernorm]
)
def test_filters_choose_layers(change: Any) -> None:
    def classes(module: nn.Module) -> list[str]:
        return [type(layer).__name__ for layer in module.modules()]

    assert classes(change(residual(), only=lambda name, layer: True)) == classes(change(residual()))
    with pytest.raises(pl.ModelError):
        change(residual(), exclude=lambda name, layer: True)
    with pytest.raises(pl.ArgumentTypeError, match=r"only='2.conv' is not a function of \(name, layer\)"):
        change(residual(), only="2.conv")
    changed = A.apply_ghost_batchnorm(residual(), 2, exclude=lambda name, layer: name.startswith("3."))
    assert [type(changed[number].norm).__name__ for number in (2, 3)] == ["GhostBatchNorm2d", "BatchNorm2d"]  # type: ignore[index]


def test_two_of_a_kind_have_buffers_of_their_own() -> None:
    first, second = (lambda name, layer: name == "2"), (lambda name, layer: name == "3")
    pair = [A.stochastic_depth(first, 0.2, name="one"), A.stochastic_depth(second, 0.4, name="two")]
    buffers = run(residual(), images(), pair).buffers
    rates = {name: round(float(value), 6) for name, value in buffers.items() if name.endswith("_rate")}
    assert rates == {"2.one_rate": 0.2, "3.two_rate": 0.4}


def test_an_average_after_surgery_starts_from_the_new_parameters() -> None:
    @pl.algorithm(Event.INIT)
    def widen(state: pl.State) -> pl.State:
        module: Any = state.module()
        module[4], module[7] = nn.Conv2d(16, 12, 3, 2, 1), nn.Linear(108, 3)
        for parameter in (*module[4].parameters(), *module[7].parameters()):
            nn.init.constant_(parameter, 0.01)
        return state.with_module(module)

    algorithms = [widen, A.blurpool(), A.ema(half_life="2ba")]
    for event, state in fit(convnet(), images(), algorithms, max_duration="1ba"):
        if event is Event.AFTER_LOAD:
            average = state.algorithm_state["ema"]["params"]
            equal(average, state.params)
            assert average["4.weight"].shape == (12, 16, 3, 3)
    assert isinstance(state.module()[4], BlurConv2d)  # type: ignore[index]


def test_all_of_training_is_in_channels_last(tmp_path: Path) -> None:
    """Weights, their moments, images of each batch of a step, and what a file holds."""
    assert A.in_channels_last(torch.zeros(8, 3, 3, 3)).stride() == (27, 1, 9, 3)
    assert A.in_channels_last(torch.zeros(2, 3, 4, 5, 6)).is_contiguous(memory_format=torch.channels_last_3d)
    line = torch.zeros(8, 3, 3)
    assert A.in_channels_last(line) is line
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.01, momentum=0.9), "batches_per_step": 2}
    model: Any = convnet()
    model[5] = nn.Identity()  # dropout draws in the order of memory
    for event, last in fit(model, images(4), [A.channels_last()], **options):
        if event is Event.BEFORE_FORWARD:
            assert last.microbatch[0].is_contiguous(memory_format=torch.channels_last)
    pl.save(last, tmp_path / "x.safetensors")
    for state in (last, pl.load(tmp_path / "x.safetensors", model=last.module())):
        for tensor in (state.params["4.weight"], state.opt_state["momentum_buffer"]["4.weight"]):
            assert tensor.stride() == (144, 1, 48, 16)
    close(last.params, run(model, images(4), **options).params)


def test_a_model_that_computes_nothing_has_outputs_of_the_shapes_of_the_model() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
            scores = self.net(x)
            return {"logits": scale * scores, "classes": scores.argmax(1)}

    outputs = A.apply_no_op_model(Named())(torch.ones(5, 4), scale=2.0)
    assert outputs["logits"].shape == (5, 3)
    assert outputs["classes"].dtype is torch.int64
    assert not outputs["logits"].any()
    assert outputs["logits"].requires_grad
    narrow = A.apply_no_op_model(nn.Sequential(nn.BatchNorm1d(3)))
    assert narrow.eval()(torch.ones(1, 3)).shape == (1, 3), "one sample is too few in training"
    state = run(convnet(), images(), [A.no_op_model()], evaluators={"val": images()})
    assert list(state.params) == ["weight"]
    torch.testing.assert_close(state.metrics["val"]["loss"], torch.tensor(3.0).log())


def test_the_model_of_a_run_is_the_changed_module() -> None:
    model: Any = convnet()
    equal(run(model, images(), [A.blurpool()]).params, run(A.apply_blurpool(model), images()).params)
    assert type(model[3]) is nn.MaxPool2d
