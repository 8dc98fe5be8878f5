"""What all algorithms that change the model at INIT keep: names, the user's module, pickles, and their errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import algorithms as A
from tests.support.runs import equal, images, noise, train


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            Residual(4),
            Residual(4),
            nn.Flatten(2),
            nn.LayerNorm(144),
            nn.Flatten(),
            nn.Linear(4 * 144, 3),
        )


# The function, the algorithm, and whether the output stays the same at the beginning.
SURGERY: dict[str, tuple[Callable[..., nn.Module], pl.Algorithm, bool]] = {
    "squeeze_excite": (
        lambda module: A.apply_squeeze_excite(module, 2, min_channels=4, init="identity"),
        A.squeeze_excite(2, min_channels=4, init="identity"),
        True,
    ),
    "weight_standardization": (A.apply_weight_standardization, A.weight_standardization(), False),
    "ghost_batchnorm": (lambda module: A.apply_ghost_batchnorm(module, 2), A.ghost_batchnorm(2), True),
    "stochastic_depth": (
        lambda module: A.apply_stochastic_depth(module, Residual, 0.3),
        A.stochastic_depth(Residual, 0.3),
        True,
    ),
    "channels_last": (A.apply_channels_last, A.channels_last(), True),
    "low_precision_layernorm": (A.apply_low_precision_layernorm, A.low_precision_layernorm(), True),
    "low_precision_groupnorm": (A.apply_low_precision_groupnorm, A.low_precision_groupnorm(), True),
}

each = pytest.mark.parametrize("name", SURGERY)


@each
def test_the_module_stays_as_it_was_and_names_stay(name: str) -> None:
    module, change = net(), SURGERY[name][0]
    before, text = copy.deepcopy(module.state_dict()), str(module)
    changed = change(module)
    equal(dict(module.state_dict()), dict(before))
    assert str(module) == text
    assert not any(block._forward_hooks for block in module.modules())
    kept = changed.state_dict()
    equal({key: kept[key] for key in before}, dict(before))
    # Pretrained weights fit: what is missing is new.
    missing, unexpected = changed.load_state_dict(before, strict=False)
    assert not unexpected
    assert all("squeeze_excite" in key for key in missing)


@each
def test_evaluation_at_the_beginning(name: str) -> None:
    change, _, same = SURGERY[name]
    x = torch.randn(4, 3, 12, 12, generator=noise())
    with torch.no_grad():
        before, after = net().eval()(x), change(net()).eval()(x)
    torch.testing.assert_close(before, after) if same else None
    assert same or not torch.allclose(before, after)


@each
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    changed = SURGERY[name][0](net()).eval()
    x = torch.randn(4, 3, 12, 12, generator=noise())
    for twin in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert torch.equal(twin(x), changed(x))


@each
def test_training_is_that_of_the_changed_module(name: str) -> None:
    """Draws at INIT and in forwards are of the run's seed, so that it is the same again, and another with another."""
    algorithm = SURGERY[name][1]
    trained = train(net(), images(), [algorithm], donate=False)
    equal(train(net(), images(), [algorithm]).params, trained.params)
    pickle.loads(pickle.dumps(trained))
    assert all(tensor.isfinite().all() for tensor in trained.params.values())
    assert not torch.equal(trained.params["7.weight"], net()[7].weight)


@each
def test_it_resumes(name: str, tmp_path: Any) -> None:
    algorithm = SURGERY[name][1]

    def stream(**options: Any) -> Any:
        settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.adamw(lr=0.01)}
        return pl.fit(net(), images(), algorithms=[algorithm], max_duration="2ep", **settings, **options)

    whole = pl.run(stream())
    for event, state in stream():
        if event is pl.Event.BATCH_CHECKPOINT and state.timestamp.batch == 4:
            pl.save(state, tmp_path / "x.safetensors")
    equal(pl.run(stream(load_path=tmp_path / "x.safetensors")).params, whole.params)


@each
def test_a_model_without_such_layers_is_refused(name: str) -> None:
    change = SURGERY[name][0]
    with pytest.raises(pl.ModelError, match=rf"{name} finds nothing to change in Sequential: .*It serves.*or leave"):
        change(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(pl.ArgumentTypeError, match=r"is not a torch\.nn\.Module"):
        change(3)


@pytest.mark.parametrize("name", sorted(SURGERY.keys() - {"channels_last"}))
def test_applied_twice_it_is_refused(name: str) -> None:
    change = SURGERY[name][0]
    with pytest.raises(pl.ModelError, match="already"):
        change(change(net()))


@pytest.mark.parametrize(
    "change", [A.apply_weight_standardization, A.apply_ghost_batchnorm, A.apply_low_precision_layernorm]
)
def test_filters(change: Any) -> None:
    def classes(module: nn.Module) -> list[str]:
        return [type(layer).__name__ for layer in module.modules()]

    assert classes(change(net(), only=lambda name, layer: True)) == classes(change(net()))
    with pytest.raises(pl.ModelError):
        change(net(), exclude=lambda name, layer: True)
    with pytest.raises(pl.ArgumentTypeError, match=r"only='2.conv' is not a function of \(name, layer\)"):
        change(net(), only="2.conv")


def test_one_of_two_layers() -> None:
    changed = A.apply_ghost_batchnorm(net(), 2, exclude=lambda name, layer: name.startswith("3."))
    assert [type(changed[number].norm).__name__ for number in (2, 3)] == ["GhostBatchNorm2d", "BatchNorm2d"]
