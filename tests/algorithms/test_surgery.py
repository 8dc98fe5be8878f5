"""All algorithms that change the model at INIT: names, the user's module, pickles, averages, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from tests.algorithms.layers import Residual, residual
from tests.support.problem import close, convnet, fit, images, noise, run
from tests.support.streams import equal

INPUTS = torch.randn(4, 3, 12, 12, generator=noise())
# The settings of each, and what is in the names of all that is new; None: names change.
SURGERY: dict[str, tuple[dict[str, Any], str | None]] = {
    "alibi": ({"max_length": 8}, ""),
    "blurpool": ({"min_channels": 4}, ""),
    "channels_last": ({}, ""),
    "factorize": ({"rank": 2, "min_features": 8}, None),
    "gated_linear_units": ({"activation": torch.relu, "init": "old", "bias": True}, "value"),
    "ghost_batchnorm": ({"size": 2}, ""),
    "gyro_dropout": ({}, ""),
    "low_precision_groupnorm": ({}, ""),
    "low_precision_layernorm": ({}, ""),
    "no_op_model": ({}, None),
    "squeeze_excite": ({"latent": 2, "min_channels": 4, "init": "identity"}, "squeeze_excite"),
    "stochastic_depth": ({"blocks": Residual, "rate": 0.3}, ""),
    "weight_standardization": ({}, ""),
}
CHANGE_OUTPUTS = {"alibi", "blurpool", "factorize", "no_op_model", "weight_standardization"}


def test_each_is_here() -> None:
    assert {*SURGERY} == {name for name in A.__all__ if hasattr(A, f"apply_{name}")}


@pytest.mark.parametrize("name", SURGERY)
def test_a_changed_copy_has_the_names_and_values_and_the_module_stays_as_it_was(name: str) -> None:
    """Evaluation begins as it was, if the method says so; copies and pickles compute the same; an average is of both.

    What has no such layers, or has them changed already, is refused.
    """
    (settings, new), change, module = SURGERY[name], getattr(A, f"apply_{name}"), residual()
    before, text = copy.deepcopy(module.state_dict()), str(module)
    changed = change(module, **settings)
    equal(dict(module.state_dict()), dict(before))
    assert str(module) == text
    assert not any(layer._forward_hooks for layer in module.modules())
    if new is not None:
        equal({key: changed.state_dict()[key] for key in before}, dict(before))
        missing, unexpected = changed.load_state_dict(before, strict=False)
        assert not unexpected, "pretrained weights fit"
        assert all(new and new in key for key in missing)
    with torch.no_grad():
        old, now = module.eval()(INPUTS), changed.eval()(INPUTS)
        assert torch.allclose(old, now, atol=1e-5) is (name not in CHANGE_OUTPUTS)
        for twin in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
            assert torch.equal(twin(INPUTS), now)
    algorithms = [getattr(A, name)(**settings), A.ema(smoothing=0.5)]
    end = run(residual(), images(2), algorithms, max_duration="1ep", strict=False)
    shapes = {key: tensor.shape for key, tensor in changed.named_parameters()}
    for params in (end.params, A.averaged(end).params):
        assert {key: tensor.shape for key, tensor in params.items()} == shapes
        assert all(tensor.isfinite().all() for tensor in params.values())
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"is not a torch\.nn\.Module"):
        change(3, **settings)
    if name not in ("alibi", "no_op_model"):  # the first forward shows that there is no attention
        with pytest.raises(pl.errors.ModelError, match=rf"{name}:? .*(to change|to replace) in Sequential"):
            change(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), **settings)
    if name not in ("channels_last", "no_op_model"):
        with pytest.raises(pl.errors.ModelError, match=r"already|nothing to change"):
            change(change(residual(), **settings), **settings)
    if "only" in inspect.signature(change).parameters:
        assert str(change(residual(), **settings, only=lambda name, layer: True)) == str(changed)
        with pytest.raises(pl.errors.ModelError):
            change(residual(), **settings, exclude=lambda name, layer: True)
        with pytest.raises(pl.errors.ArgumentTypeError, match=r"only='2.conv' is not a function of \(name, layer\)"):
            change(residual(), **settings, only="2.conv")


def test_the_model_of_a_run_is_the_changed_module_and_two_of_a_kind_have_buffers_of_their_own() -> None:
    model: Any = convnet()
    equal(run(model, images(), [A.blurpool()]).params, run(A.apply_blurpool(model), images()).params)
    assert type(model[3]) is nn.MaxPool2d
    changed: Any = A.apply_ghost_batchnorm(residual(), 2, exclude=lambda name, layer: name.startswith("3."))
    assert [type(changed[number].norm).__name__ for number in (2, 3)] == ["GhostBatchNorm2d", "BatchNorm2d"]
    first, second = (lambda name, layer: name == "2"), (lambda name, layer: name == "3")
    pair = [A.stochastic_depth(first, 0.2, name="one"), A.stochastic_depth(second, 0.4, name="two")]
    buffers = run(residual(), images(1), pair).buffers
    rates = {name: round(float(value), 6) for name, value in buffers.items() if name.endswith("_rate")}
    assert rates == {"2.one_rate": 0.2, "3.two_rate": 0.4}


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


class Named(nn.Linear):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        scores = super().forward(x)
        return {"logits": scale * scores, "classes": scores.argmax(1)}


def test_a_model_that_computes_nothing_has_outputs_of_the_shapes_of_the_model() -> None:
    outputs = A.apply_no_op_model(Named(4, 3))(torch.ones(5, 4), scale=2.0)
    assert (outputs["logits"].shape, outputs["classes"].dtype) == ((5, 3), torch.int64)
    assert not outputs["logits"].any()
    assert outputs["logits"].requires_grad
    narrow = A.apply_no_op_model(nn.Sequential(nn.BatchNorm1d(3)))
    assert narrow.eval()(torch.ones(1, 3)).shape == (1, 3), "one sample is too few in training"
    state = run(convnet(), images(), [A.no_op_model()], evaluators={"val": images()})
    assert list(state.params) == ["weight"]
    torch.testing.assert_close(state.metrics["val"]["loss"], torch.tensor(3.0).log())
