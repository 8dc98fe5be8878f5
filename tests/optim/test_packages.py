"""Each class of pytorch_optimizer and schedulefree: bitwise the class, resumed; or refused.

The lists are of the versions in constraints.txt.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError
from pure_loop.optim import evaluation_params, from_torch, master_weights, partition
from pure_loop.random import seeded
from tests.conftest import THOROUGH
from tests.support import problem
from tests.support.optimizing import branches, by_hand
from tests.support.tiers import tiers

EPOCHS, BATCHES = 4, 5
DATA = problem.points(BATCHES)


def model(bias: bool = True) -> nn.Module:
    with seeded(1):
        return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))


def fit(start: Any, optimizer: pl.optim.Optimizer, data: Any = DATA, **options: Any) -> Any:
    return problem.fit(start, data, optimizer=optimizer, **{"max_duration": f"{EPOCHS}ep", "strict": False, **options})


def check(cls: Any, options: dict[str, Any], folder: Path, *, bias: bool = True) -> list[pl.State]:
    """The class itself over 20 steps, and resumed from a State after 7 of them, that was kept or saved."""
    optimizer, module = from_torch(cls, **options), model(bias)
    (*_, wanted) = by_hand(module, [cls(module.parameters(), **options)], DATA, epochs=EPOCHS)
    kept = [state for event, state in fit(model(bias), optimizer) if event is Event.BATCH_END]
    pl.save(kept[6], folder / "x.safetensors")
    loaded = pl.load(folder / "x.safetensors", model=model(bias))
    for last in (kept[-1], pl.run(fit(kept[6], optimizer)), pl.run(fit(loaded, from_torch(cls, **options)))):
        problem.close(last.params, wanted, 0.0)
    return kept


# They need a closure, a base optimizer, the model, or what their arguments can't say; or keep what no State can hold.
REFUSED = (
    *("AdaGO", "AdaHessian", "AdaLOMO", "AdaMuon", "AdamMini", "AliG", "BSAM", "Conda", "DeMo", "DistributedMuon"),
    *("FriendlySAM", "GSAM", "LBFGS", "LOMO", "LookSAM", "Lookahead", "Magma", "Muon", "MuonClip", "NorMuon"),
    *("OrthoGrad", "PCGrad", "Ranger21", "SAM", "SaRA", "SafeFP16Optimizer", "ScalableShampoo"),
    *("ScheduleFreeWrapper", "SophiaH", "TRAC", "WSAM"),
)
FEW = ("Adan", "AdaShift", "Prodigy", "ScheduleFreeAdamW", "SOAP")


@pytest.mark.slow  # the package takes seconds to be imported
def test_classes_of_pytorch_optimizer(tmp_path: Path) -> None:
    """A few in the slow tier, all in the thorough one; none that isn't the class or refused."""
    package: Any = pytest.importorskip("pytorch_optimizer.optimizer")
    every = {
        name for name, cls in vars(package).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    classes = every - {"Optimizer", "BaseOptimizer"}
    assert len(classes) > 100
    for name in REFUSED:
        with pytest.raises(ArgumentError, match=rf"from_torch\S*:? .*{name}"):
            from_torch(getattr(package, name))
    for name in sorted(classes - {*REFUSED}) if THOROUGH else FEW:
        check(getattr(package, name), {}, tmp_path / name, bias=name != "SpectralSphere")  # of matrices


# Classes with weights for training and others for evaluation


SCHEDULE_FREE = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreePaper"]


def class_of(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    options = {"lr": 0.05, **options} if name.startswith("RAdam") else {"lr": 0.05, "warmup_steps": 3, **options}
    return getattr(pytest.importorskip("schedulefree"), name), options


@pytest.mark.parametrize("name", tiers(SCHEDULE_FREE, SCHEDULE_FREE[:2]))
def test_it_is_the_class_in_both_modes(name: str, tmp_path: Path) -> None:
    """A layer that is used for the first time later keeps its place; evaluations leave training as it is."""
    cls, options = class_of(name)
    module, optimizer = branches(), from_torch(cls, **options)
    hand = cls(module.parameters(), **options)
    hand.train()
    trained = by_hand(module, [hand], DATA, epochs=EPOCHS)
    hand.eval()
    evaluated = copy.deepcopy(dict(module.named_parameters()))
    loss = problem.cross_entropy(module(DATA[0][0]), DATA[0][1]).item()

    @pl.algorithm(Event.EVAL_START)
    def averages(state: pl.State) -> pl.State:
        return state.replace(params=evaluation_params(state, optimizer))

    kept = [s for event, s in fit(branches(), optimizer) if event is Event.BATCH_END]
    for state, expected in zip(kept, trained, strict=True):
        problem.close(state.params, expected, 0.0)
    structure = optree.tree_structure(optimizer.init(kept[-1].params), namespace="pure_loop")
    assert optree.tree_structure(kept[-1].opt_state, namespace="pure_loop") == structure
    problem.close(evaluation_params(kept[-1], optimizer), {n: p.detach() for n, p in evaluated.items()}, 0.0)
    watched = pl.evaluate(kept[-1], {"held": DATA[:1]}, loss=problem.cross_entropy, algorithms=[averages])
    assert float(pl.run(watched).metrics["held"]["loss"]) == pytest.approx(loss, rel=1e-6)
    pl.save(kept[6], tmp_path / "x.safetensors")
    for start in (kept[6], pl.load(tmp_path / "x.safetensors", model=branches())):
        last = pl.run(fit(start, from_torch(cls, **options), evaluators=DATA[:2], algorithms=[averages]))
        problem.close(last.params, trained[-1], 0.0)


def test_parts_have_modes_of_their_own_and_copies_have_an_average() -> None:
    cls, options = class_of("AdamWScheduleFree")
    parts = {"w": from_torch(cls, **options), "b": pl.optim.sgd(0.1)}
    optimizer = partition(parts, label=lambda name, tensor: "b" if tensor.ndim < 2 else "w")
    state = pl.run(fit(model(), optimizer))
    params = evaluation_params(state, optimizer)
    assert list(params) == list(state.params)
    assert torch.equal(params["0.bias"], state.params["0.bias"])
    assert not torch.equal(params["0.weight"], state.params["0.weight"])

    inner, halves = from_torch(cls, **options), [(inputs.bfloat16(), targets) for inputs, targets in DATA]
    optimizer = master_weights(inner)
    state = pl.run(fit(model().bfloat16(), optimizer, halves))
    copies = pl.State.create(model()).replace(params=state.opt_state["master"], opt_state=state.opt_state["inner"])
    expected, params = evaluation_params(copies, inner), evaluation_params(state, optimizer)
    problem.close(params, {name: param.bfloat16() for name, param in expected.items()}, 0.0)
    assert any(not torch.equal(params[name], state.params[name]) for name in params)
    plain = master_weights(partition({"all": pl.optim.adamw()}, label=lambda name, tensor: "all"))
    state = pl.run(fit(model().bfloat16(), plain, halves, max_duration="1ba"))
    with pytest.raises(ArgumentError, match="has one set of parameters"):
        evaluation_params(state, plain)


class Quantized(torch.optim.SGD):
    """As torchao's optimizers of few bits say of themselves."""

    def _subclass_zeros(self) -> None: ...


def test_classes_that_need_more_than_gradients_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"AdamWScheduleFreeClosure can't be used, because .*step\(closure\)"):
        from_torch(class_of("AdamWScheduleFreeClosure")[0])
    with pytest.raises(ArgumentError, match=r"Quantized can't be used, .* tensors of classes of its own"):
        from_torch(Quantized)
