"""Each class of torch.optim, pytorch_optimizer, bitsandbytes: bitwise the class over 20 steps, resumed; or refused.

Those of schedulefree are in test_schedule_free.py. The lists are of the versions in constraints.txt.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError
from pure_loop.optim import from_torch
from tests.support.tiers import tiers

mse = nn.functional.mse_loss
EPOCHS, BATCHES = 4, 5


def model(bias: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=g), torch.randn(4, 4, generator=g)) for _ in range(BATCHES)]


def by_hand(module: nn.Module, cls: Any, options: dict[str, Any]) -> list[Tensor]:
    """Parameters after 20 steps of a plain loop."""
    optimizer = cls(module.parameters(), **options)
    for number in range(EPOCHS * BATCHES):
        inputs, targets = batches()[number % BATCHES]
        mse(module(inputs), targets).backward()
        # Where a class draws random numbers, they are of the run's seed and this batch.
        with pl.random.seeded_all(pl.random.derive(0, "update", number // BATCHES, number)):
            optimizer.step()
        module.zero_grad()
    return [param.detach() for param in module.parameters()]


def assert_is_the_class(cls: Any, options: dict[str, Any], folder: Path, *, bias: bool = True) -> None:
    """Over 20 steps, and resumed from a State after 7 of them, that was kept or saved."""

    def fit(start: Any) -> Any:
        return pl.fit(start, batches(), loss=mse, optimizer=from_torch(cls, **options), max_duration=f"{EPOCHS}ep")

    expected = by_hand(model(bias), cls, options)
    kept = [state for event, state in fit(model(bias)) if event is Event.BATCH_END]
    pl.save(kept[6], folder / "x.safetensors")
    loaded = pl.load(folder / "x.safetensors", model=model(bias))
    for last in (kept[-1], pl.run(fit(kept[6])), pl.run(fit(loaded))):
        for (name, param), value in zip(last.params.items(), expected, strict=True):
            assert torch.equal(param, value), name


OF_TORCH = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


@pytest.mark.parametrize("name", tiers([name for name in OF_TORCH if name != "SparseAdam"], {"NAdam"}))
def test_classes_of_torch(name: str, tmp_path: Path) -> None:
    assert_is_the_class(getattr(torch.optim, name), {}, tmp_path, bias=name != "Muon")


OF_PYTORCH_OPTIMIZER = (
    *("A2Grad", "ADOPT", "APOLLO", "ASGD", "AccSGD", "AdEMAMix", "AdaBelief", "AdaBound", "AdaDelta", "AdaFactor"),
    *("AdaGC", "AdaMax", "AdaMod", "AdaNorm", "AdaPNM", "AdaShift", "AdaSmooth", "AdaTAM", "Adai", "Adalite", "Adam"),
    *("AdamC", "AdamG", "AdamP", "AdamS", "AdamW", "AdamWSN", "Adan", "AggMo", "Aida", "Alice", "Amos", "Ano"),
    *("ApolloDQN", "AvaGrad", "BCOS", "CAME", "DASH", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion"),
    *("DAdaptSGD", "DiffGrad", "DualAdam", "EXAdam", "EmoFact", "EmoLynx", "EmoNavi", "FAdam", "FOCUS", "FTRL"),
    *("Fira", "FlashAdamW", "Fromage", "GaLore", "Grams", "Gravity", "GrokFastAdamW", "Kate", "Kron", "LARS"),
    *("LaProp", "Lamb", "Lion", "LoRARite", "MADGRAD", "MARS", "MSVAG", "NAdam", "Nero", "NovoGrad", "PAdam", "PID"),
    *("PNM", "Prodigy", "QHAdam", "QHM", "RACS", "RAdam", "RMSprop", "ROSE", "Ranger", "SCION", "SCIONLight", "SGD"),
    *("SGDP", "SGDSaI", "SGDW", "SM3", "SOAP", "SPAM", "SPlus", "SRMM", "SWATS", "ScheduleFreeAdamW"),
    *("ScheduleFreeRAdam", "ScheduleFreeSGD", "Shampoo", "SignSGD", "SimplifiedAdEMAMix", "StableAdamW"),
    *("StableSPAM", "TAM", "Tiger", "VSGD", "Yogi"),
)
# They need a closure, a base optimizer, the model, or what their arguments can't say; or keep what no State can hold.
REFUSED = (
    *("AdaGO", "AdaHessian", "AdaLOMO", "AdaMuon", "AdamMini", "AliG", "BSAM", "Conda", "DeMo", "DistributedMuon"),
    *("FriendlySAM", "GSAM", "LBFGS", "LOMO", "LookSAM", "Lookahead", "Magma", "Muon", "MuonClip", "NorMuon"),
    *("OrthoGrad", "PCGrad", "Ranger21", "SAM", "SaRA", "SafeFP16Optimizer", "ScalableShampoo"),
    *("ScheduleFreeWrapper", "SophiaH", "TRAC", "WSAM"),
)
FEW = {"Adan", "AdaShift", "Prodigy", "ScheduleFreeAdamW", "SOAP"}


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(OF_PYTORCH_OPTIMIZER, FEW))
def test_classes_of_pytorch_optimizer(name: str, tmp_path: Path) -> None:
    assert_is_the_class(getattr(pytest.importorskip("pytorch_optimizer.optimizer"), name), {}, tmp_path)


@pytest.mark.slow
def test_no_class_of_pytorch_optimizer_is_left_out() -> None:
    package = pytest.importorskip("pytorch_optimizer.optimizer")
    classes = {
        name
        for name, cls in vars(package).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.Optimizer)
        and name not in ("Optimizer", "BaseOptimizer")
    }
    only_matrices = {"SpectralSphere"}
    assert classes == {*OF_PYTORCH_OPTIMIZER, *REFUSED} | only_matrices
    for name in REFUSED:
        with pytest.raises(ArgumentError, match=rf"from_torch\S*:? .*{name}"):
            from_torch(getattr(package, name))


@pytest.mark.thorough
def test_a_class_for_matrices_of_pytorch_optimizer(tmp_path: Path) -> None:
    cls: Any = pytest.importorskip("pytorch_optimizer.optimizer").SpectralSphere
    assert_is_the_class(cls, {}, tmp_path, bias=False)


# Those that a CPU has kernels for: AdEMAMix32bit has none. Not in the extra dev: 43 MB, for a GPU above all.
OF_BITSANDBYTES = (
    *("AdEMAMix", "AdEMAMix8bit", "Adagrad", "Adagrad32bit", "Adagrad8bit", "Adam", "Adam32bit", "Adam8bit", "AdamW"),
    *("AdamW32bit", "AdamW8bit", "LAMB", "LAMB32bit", "LAMB8bit", "LARS", "LARS32bit", "LARS8bit", "Lion"),
    *("Lion32bit", "Lion8bit", "PagedAdEMAMix", "PagedAdEMAMix8bit", "PagedAdam", "PagedAdam32bit", "PagedAdam8bit"),
    *("PagedAdamW", "PagedAdamW32bit", "PagedAdamW8bit", "PagedLion", "PagedLion32bit", "PagedLion8bit"),
    *("PytorchLARS", "RMSprop", "RMSprop32bit", "RMSprop8bit", "SGD", "SGD32bit", "SGD8bit"),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", OF_BITSANDBYTES)
def test_classes_of_bitsandbytes(name: str, tmp_path: Path) -> None:
    cls: Any = getattr(pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim, name)
    taken = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": 0.01}
    if "min_8bit_size" in taken:  # so that the weights here have their state in 8 bits, too
        options["min_8bit_size"] = 8
    if name.startswith(("LARS", "SGD", "RMSprop", "PytorchLARS")):
        options["momentum"] = 0.9
    assert_is_the_class(cls, options, tmp_path)
