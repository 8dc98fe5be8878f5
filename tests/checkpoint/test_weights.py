"""Files of weights alone: what other libraries read, what training starts with, and names that differ."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.algorithms import averaged
from pure_loop.callbacks import CheckpointSaver
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import DATA, fit, names, small, trained
from tests.support.problem import close, mlp
from tests.support.streams import assert_same
from tests.support.tiers import examples


def same_weights(one: pl.State, other: pl.State) -> None:
    assert_same({**one.params, **one.buffers}, {**other.params, **other.buffers}, "weights")


def weights(path: Path, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    state = pl.load(path, model=model, weights_only=True, **options)
    return {**state.params, **state.buffers}


def test_a_module_of_torch_loads_them_and_a_run_starts_with_them(tmp_path: Path) -> None:
    state, path = trained(), tmp_path / "w.safetensors"
    pl.save(state, path, weights_only=True, notes={"why": "a test"})
    module = small()
    module.load_state_dict(load_file(path))  # strict: these names and no others
    assert torch.equal(module.eval()(DATA[0][0]), state.module(training=False)(DATA[0][0]))
    said = pl.checkpoint.describe(path)
    assert (said["batch"], said["epoch"], said["notes"]) == (8, 2, {"why": "a test"})
    with pytest.raises(ResumeError, match=r"weights alone, of batch 8.*optimizer state.*weights_only=True\)"):
        pl.load(path, model=small())
    assert pl.latest_path(tmp_path) is None
    begun = pl.load(path, model=small(), weights_only=True)
    assert (begun.timestamp, begun.opt_state) == (pl.Timestamp(), None)
    save_file(module.state_dict(), tmp_path / "plain.safetensors")
    wanted = pl.run(fit(begun))
    for file in (path, tmp_path / "plain.safetensors"):
        same_weights(pl.run(fit(load_path=file)), wanted)
    for change in ("[]", "{}", '{"format": 99}', '{"format": 1, "made_by": 5}'):
        save_file(load_file(path), path, metadata={"pure_loop.weights": change})
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            pl.load(path, model=small(), weights_only=True)


class Odd(nn.Module):
    """Tied weights, buffers that ``state_dict()`` leaves out, one that a forward makes, complex numbers, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 3)
        self.tied = self.first
        self.table = nn.Parameter(torch.randn(3, 4).t())
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.late = x.detach().mean(0)
        return self.second(self.tied(self.first(x)) + self.table.sum(1) + self.wave.real + self.hidden)


def test_odd_modules_come_back(tmp_path: Path) -> None:
    state, path = pl.run(fit(Odd(), algorithms=[])), tmp_path / "odd.safetensors"
    pl.save(state, path, weights_only=True)
    assert set(load_file(path)) == {"first.weight", "second.weight", "second.bias", "table", "wave", "late"}
    same_weights(pl.load(path, model=Odd(), weights_only=True), state)
    # As other libraries write them: what state_dict() leaves out stays the model's own.
    plain = {name: each.resolve_conj().contiguous() for name, each in Odd().state_dict().items() if name[:4] != "tied"}
    save_file(plain, path)
    loaded = pl.load(path, model=Odd())
    assert torch.equal(loaded.params["second.weight"], plain["second.weight"])
    assert loaded.buffers["hidden"].tolist() == [1.0] * 4


def test_a_saver_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_interval": "1ba", "autoresume": tmp_path / "r"}
    best: Any = {"keep_last": 1, "keep_best": 1, "metric": "val/loss"}
    saver = CheckpointSaver(tmp_path / "w", weights_only=True, interval="1ba", **best)
    pl.run(fit(max_duration="1ep", callbacks=saver, **options))
    state = pl.run(fit(callbacks=saver, **options))
    # Files of the run before it was resumed count, and are removed.
    found: Any = pl.best_path(tmp_path / "w")
    assert {*names(tmp_path / "w")} == {"ep2-ba8.safetensors", Path(found).name}
    loaded = pl.load(tmp_path / "w" / "latest", model=small(), weights_only=True)
    same_weights(loaded, averaged(state))  # which the evaluation measured
    same_weights(pl.run(fit(watch=(), eval_interval="1ba")), state)
    model = mlp()
    model.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"state.buffers\['odd'\] has dtype"):  # before training
        pl.run(fit(model, callbacks=CheckpointSaver(tmp_path / "odd", weights_only=True)))


# Two names of one weight


def tied(tie: bool = True) -> nn.Module:
    with pl.random.seeded(0):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    if tie:
        model[2].weight = model[0].weight
    return model


def test_two_names_of_one_weight_that_differ_in_a_file_are_refused(tmp_path: Path) -> None:
    """Examples of other numbers, shapes and kinds are drawn among plain weights."""
    path, tensors = tmp_path / "w.safetensors", {name: each.clone() for name, each in tied().state_dict().items()}
    for first, second in ((0.0, -0.0), (1.0, 2.0)):
        save_file({**tensors, "0.weight": torch.full((2, 2), first), "2.weight": torch.full((2, 2), second)}, path)
        for way in (lambda: weights(path, tied(), strict=False), lambda: pl.run(fit(tied(), load_path=path))):
            with pytest.raises(ResumeError, match=r"'(0|2).weight' and '(0|2).weight' are one tied weight of Sequ"):
                way()
    pl.save(pl.State.create(tied(tie=False)), path)
    with pytest.raises(ResumeError, match="are one tied weight of Sequential, and the file has other numbers"):
        weights(path, tied())
    # safetensors' own save_model writes one of the names: the other is missing where it is another weight.
    save_model(tied(), str(path))
    same_weights(pl.load(path, model=tied()), pl.State.create(tied()))
    with pytest.raises(ResumeError, match=r"the file lacks .'(0|2)\.weight'"):
        pl.load(path, model=tied(tie=False))
    model = tied()
    model[1].register_buffer("again", model[1].running_mean)
    save_file({**tensors, "1.again": tensors["1.running_mean"].clone()}, path)
    pl.load(path, model=model)
    save_file({**tensors, "1.again": tensors["1.running_mean"] + 1}, path)
    with pytest.raises(ResumeError, match="are one tied weight"):
        pl.load(path, model=model)


# Another model


def test_a_state_of_another_model_is_refused_by_leaf(tmp_path: Path) -> None:
    """Nothing is loaded half, by none of the ways to load it; the error says how the leaf is on either side."""
    path = tmp_path / "x.safetensors"
    wider, reshaped = small(), small()
    wider[0] = nn.Linear(7, 5)
    reshaped[1].register_buffer("running_var", torch.zeros(7))
    rows: Any = [
        (mlp(), small(), "the file lacks ['1.weight'"),
        (wider, small(), "params['0.weight'] is (5, 7) float32 in the file and (5, 4) float32"),
        (reshaped, small(), "buffers['1.running_var'] is (7,) float32 in the file and (5,) float32"),
        (small().double(), small(), "params['0.weight'] is (5, 4) float64 in the file and (5, 4) float32"),
        (tied(), tied(tie=False), "2.weight"),
        (tied(tie=False), tied(), "2.weight"),
    ]
    for given_model, model, says in rows:
        pl.save(pl.State.create(given_model), path)
        for way in (
            lambda model=model: pl.load(path, model=model),
            lambda model=model: fit(model, load_path=path),
            lambda model=model: fit(model, autoresume=tmp_path),
            lambda model=model: fit(pl.State.create(model), autoresume=tmp_path),
        ):
            with pytest.raises(ResumeError) as caught:
                way()
            assert str(path) in str(caught.value)
            assert says in str(caught.value)
    pl.save(trained(), path)
    for how in ({"load_path": path}, {"autoresume": tmp_path}):
        with pytest.raises(ResumeError, match=r"x\.safetensors.*opt_state was made by another optimizer"):
            fit(optimizer=pl.optim.adamw(lr=0.1), **how)


# exclude= and rename=

KINDS: dict[str, Callable[[pl.State, Path], None]] = {
    "another library's": lambda state, path: save_file(state.module().state_dict(), path),
    "weights": lambda state, path: pl.save(state, path, weights_only=True),
    "a State": pl.save,
}
# A module has attributes of its own, such as "xpu".
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3).filter(lambda name: not hasattr(nn.ModuleDict, name))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@examples(25, 500)
@given(names=st.dictionaries(NAMES, st.tuples(NAMES, DTYPES), min_size=2, max_size=5), data=st.data())
def test_any_names_and_any_globs(tmp_path_factory: pytest.TempPathFactory, names: Any, data: st.DataObject) -> None:
    """Modules of drawn names are renamed and left out one by one: each weight is where both say, or the model's own."""
    new = {old: f"{place}{name}" for place, (old, (name, _)) in enumerate(names.items())}
    excluded = data.draw(st.sets(st.sampled_from(sorted(new.values())), max_size=len(new) - 1))
    saved = pl.State.create(nn.ModuleDict({old: nn.Linear(1, 2).to(dtype) for old, (_, dtype) in names.items()}))
    model = nn.ModuleDict({new[old]: nn.Linear(1, 2).to(dtype) for old, (_, dtype) in names.items()})
    dot = data.draw(st.sampled_from(["", "."]))
    rename: Any = {f"{old}{dot}": f"{name}{dot}" for old, name in new.items()}
    if data.draw(st.booleans()):
        rename = lambda name: new[name.partition(".")[0]] + "." + name.partition(".")[2]  # noqa: E731
    path = tmp_path_factory.mktemp("weights") / "x.safetensors"
    KINDS[data.draw(st.sampled_from(sorted(KINDS)))](saved, path)
    loaded = weights(path, model, exclude=[f"{name}.*" for name in excluded], rename=rename)
    for old, name in new.items():
        for kind in ("weight", "bias"):
            own = model.get_parameter(f"{name}.{kind}")
            assert_same(
                {"": loaded[f"{name}.{kind}"]}, {"": own if name in excluded else saved.params[f"{old}.{kind}"]}, kind
            )


def classifier(body: str = "backbone", classes: int = 3) -> nn.Module:
    model = nn.Module()
    model.add_module(body, nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    model.add_module("head", nn.Linear(4, classes))
    return model


def test_heads_beginnings_and_ties(tmp_path: Path) -> None:
    path, saved = tmp_path / "x.safetensors", classifier()
    pl.save(pl.State.create(saved), path)
    for model in (classifier(classes=7), classifier(classes=7)):
        loaded = weights(path, model, exclude="head.*")
        close(loaded, {**saved.state_dict(), **{k: v for k, v in model.state_dict().items() if k[:4] == "head"}}, 0)
    del model.head
    assert weights(path, model, exclude="head.*").keys() == model.state_dict().keys()
    for rename in (
        {"backbone.0": "encoder.0", "backbone.1.": "encoder.1."},
        {"backbone": "nothing", "backbone.0": "encoder.0", "backbone.1": "encoder.1"},  # the longest counts
    ):
        loaded = weights(path, classifier("encoder"), rename=rename)
        close({name.replace("encoder", "backbone"): tensor for name, tensor in loaded.items()}, saved.state_dict(), 0)
    with pytest.raises(ResumeError, match=r"the file lacks.*encoder\.0.*the model lacks.*backbone\.0"):
        weights(path, classifier("encoder", classes=9), exclude=["head.*"])
    wrapped = nn.ModuleDict({"model": saved})
    close(weights(path, wrapped, rename={"": "model."}), wrapped.state_dict(), 0)
    pl.save(pl.State.create(wrapped), path)
    close(weights(path, classifier(), rename={"model.": ""}), saved.state_dict(), 0)
    pl.save(pl.State.create(tied()), path)
    for name in ("0.weight", "2.weight"):
        other = tied()
        nn.init.ones_(other[0].weight)
        assert weights(path, other, exclude=[name])["0.weight"].eq(1).all()


@pytest.mark.parametrize("weights_only", [False, True])
def test_adapters_of_a_base_of_other_names(tmp_path: Path, weights_only: bool) -> None:
    def frozen(body: str) -> nn.Module:
        with pl.random.seeded(5):
            model = classifier(body)
        model.get_submodule(body).requires_grad_(False)
        return model

    state, path = pl.State.create(frozen("backbone")), tmp_path / "x.safetensors"
    state = state.replace(params={name: tensor + (name[:4] == "head") for name, tensor in state.params.items()})
    pl.save(state, path, trained_only=True, weights_only=weights_only)
    rename = {"backbone": "encoder"}
    assert torch.equal(weights(path, frozen("encoder"), rename=rename)["head.weight"], state.params["head.weight"])
    other = frozen("encoder")
    other.get_parameter("encoder.0.bias").data += 1
    with pytest.raises(ResumeError, match=r"params\['encoder\.0\.bias'\]"):
        weights(path, other, rename=rename)
    loaded = weights(path, other, exclude=["encoder.0.bias"], rename=rename)
    assert torch.equal(loaded["encoder.0.bias"], other.get_parameter("encoder.0.bias"))


def test_of_a_state_memories_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    pl.save(pl.run(fit(max_duration="1ep")), path)
    whole, loaded = pl.load(path, model=small()), pl.load(path, model=small(), exclude=["algorithm_state/e*"])
    assert_same(loaded, whole.replace(algorithm_state={}), "the rest")
    _, begun = next(iter(fit(loaded)))
    average = begun.algorithm_state["ema"]["params"]["0.weight"]
    assert torch.equal(average, whole.params["0.weight"])
    assert not torch.equal(average, whole.algorithm_state["ema"]["params"]["0.weight"])
    loaded = pl.load(path, model=small(), exclude="opt_state")
    assert pl.run(fit(loaded, optimizer=pl.optim.adamw(lr=0.1))).timestamp.batch == 8


def test_names_that_do_not_fit_are_said_in_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(3, 4), **{f"{i}\nWARNING": torch.ones(1) for i in range(99)}}, path)
    state = pl.load(path, model=nn.Linear(4, 3), weights_only=True, strict=False)
    assert state.params["weight"].sum() == 12
    message = caplog.records[-1].getMessage()
    assert "own values stay for ['bias']; the model has no ['" in message
    assert "\n" not in message
    assert len(message) < 300
