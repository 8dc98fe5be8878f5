"""A State goes on in a model whose names have changed since, and an error says how."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.frozendict import FrozenDict
from tests.support import problem
from tests.support.streams import assert_same, leaves
from tests.support.tiers import examples

WIDTHS = {"first": (3, 4), "second": (4, 5), "head": (5, 2)}
OWN = ("buffer_gone", "buffer_new")


class Part(nn.Module):
    def __init__(self, width: tuple[int, int], buffers: tuple[str, ...], hidden: int | None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(*width), nn.BatchNorm1d(width[1])
        for name in buffers:
            self.register_buffer(name, torch.ones(width[1] + len(name)))
        if hidden is not None:
            self.register_buffer("hidden", torch.zeros(hidden), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.tanh(self.norm(self.linear(x)))
        return outputs


class Net(nn.Module):
    """Three parts, each of a shape of its own, under any names, in a wrapper or not; the numbers don't depend on these.

    Args:
        names: by part.
        wrapper: a name in front of all others; "": none.
        buffers: names by part.
        hidden: by part, the length of a buffer that state_dict() leaves out.
        classes: the outputs of the head.
    """

    def __init__(
        self,
        names: dict[str, str] | None = None,
        wrapper: str = "",
        buffers: dict[str, tuple[str, ...]] | None = None,
        hidden: dict[str, int] | None = None,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.names, self.wrapper = names or {part: part for part in WIDTHS}, wrapper
        inner = nn.Module() if wrapper else self
        with pl.random.seeded(0):
            for part, width in WIDTHS.items():
                size = (width[0], classes) if part == "head" else width
                inner.add_module(self.names[part], Part(size, (buffers or {}).get(part, ()), (hidden or {}).get(part)))
        if wrapper:
            self.add_module(wrapper, inner)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.get_submodule(self.wrapper)
        for part in WIDTHS:
            x = inner.get_submodule(self.names[part])(x)
        return x

    def beginning(self, part: str) -> str:
        return f"{self.wrapper}.{self.names[part]}." if self.wrapper else f"{self.names[part]}."


def freezing(state: pl.State) -> pl.State:
    """From the second batch on the first two parameters are frozen."""
    return state.replace(frozen=frozenset(list(state.params)[:2])) if state.timestamp.batch == 1 else state


OPTIMIZERS: dict[str, Callable[[], pl.optim.Optimizer]] = {
    "adamw": lambda: pl.optim.adamw(lr=0.05),
    "partition": lambda: pl.optim.partition(
        {"m": pl.optim.adamw(lr=0.05), "v": pl.optim.sgd(lr=0.05, momentum=0.9)},
        lambda name, tensor: "m" if tensor.ndim == 2 else "v",
    ),
    "master": lambda: pl.optim.master_weights(pl.optim.adamw(lr=0.05)),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.AdamW, lr=0.05),
}


def fit(start: Any, optimizer: str = "adamw", batches: int = 5, classes: int = 2, **options: Any) -> pl.Stream:
    generator = problem.noise(1)
    data = [(torch.randn(4, 3, generator=generator), torch.zeros(4, classes)) for _ in range(5)]
    algorithms = [
        A.ema(half_life="2ba"),
        A.lookahead(interval=2),
        pl.Algorithm("freezing", {Event.BATCH_END: freezing}),
    ]
    settings = {"loss": mse_loss, "algorithms": algorithms, "max_duration": f"{batches}ba", "strict": False, **options}
    return pl.fit(start, data, optimizer=OPTIMIZERS[optimizer](), **settings)


def kept(model: nn.Module, batch: int, optimizer: str = "adamw") -> pl.State:
    return next(s for e, s in fit(model, optimizer) if e is Event.BATCH_CHECKPOINT and s.timestamp.batch == batch)


def known(state: pl.State) -> dict[str, Any]:
    fields = ("params", "buffers", "opt_state", "algorithm_state")
    return {path: leaf for path, leaf in leaves(state).items() if path.startswith(fields)}


parts = st.sampled_from(sorted(WIDTHS))
names = st.permutations(["alpha", "beta", "gamma", "first", "second", "head"]).map(
    lambda some: dict(zip(WIDTHS, some, strict=False))
)
models = st.fixed_dictionaries(
    {
        "names": names,
        "wrapper": st.sampled_from(["", "module", "_orig_mod"]),
        "hidden": st.dictionaries(parts, st.just(2)),
    }
)


@examples(12, 200)
@given(
    old=models,
    new=models,
    gone=st.sets(parts),
    added=st.sets(parts),
    batch=st.integers(1, 4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    data=st.data(),
)
def test_a_run_goes_on_under_other_names(
    tmp_path_factory: pytest.TempPathFactory,
    old: dict[str, Any],
    new: dict[str, Any],
    gone: set[str],
    added: set[str],
    batch: int,
    optimizer: str,
    data: st.DataObject,
) -> None:
    """Bit for bit it is the run that the renamed model has from its start; what is not named is refused."""
    path = tmp_path_factory.mktemp("run") / "x.safetensors"
    saved = Net(**old, buffers=dict.fromkeys(gone, OWN[:1]))
    model = Net(**new, buffers=dict.fromkeys(added, OWN[1:]))
    pl.save(kept(saved, batch, optimizer), path)
    rename = {saved.beginning(part): model.beginning(part) for part in WIDTHS}
    exclude = [f"*.{name}" for name, some in zip(OWN, (gone, added), strict=True) if some]
    loaded = pl.load(path, model=model, rename=rename, exclude=exclude)
    assert_same(known(pl.run(fit(loaded, optimizer))), known(pl.run(fit(model, optimizer))), "goes on")
    # What was done is in the notes, and in those of each checkpoint from now on.
    moved = tuple(
        (name, next(new + name.removeprefix(old) for old, new in rename.items() if name.startswith(old)))
        for name in (*saved.state_dict(), *(f"{saved.beginning(part)}hidden" for part in sorted(old["hidden"])))
        if not name.endswith(OWN)
    )
    changed = {pair for pair in moved if pair[0] != pair[1] and not pair[0].endswith("hidden")}
    for note in loaded.notes:
        assert {pair for pair in note.renamed if not pair[0].endswith("hidden")} == changed
        assert {*note.added} == {f"{model.beginning(part)}{OWN[1]}" for part in added}
        assert {*note.removed} == {f"{saved.beginning(part)}{OWN[0]}" for part in gone}
    assert len(loaded.notes) == bool(changed or gone or added) or all(old == new for old, new in changed)
    pl.save(loaded, path.parent / "again.safetensors")
    assert pl.load(path.parent / "again.safetensors", model=model).notes == loaded.notes
    # One beginning or glob less: refused, and nothing is loaded. The call in the error then does what was meant.
    needed = [old for old, name in rename.items() if old != name]
    if needed:
        less = data.draw(st.sampled_from(needed))
        with pytest.raises((pl.errors.ResumeError, pl.errors.ArgumentError)):
            pl.load(
                path, model=model, rename={old: name for old, name in rename.items() if old != less}, exclude=exclude
            )
    for glob in exclude:
        with pytest.raises(pl.errors.ResumeError, match=glob.removeprefix("*.")):
            pl.load(path, model=model, rename=rename, exclude=[other for other in exclude if other != glob])
    # What took the name of another part can't be told.
    if (needed or exclude) and not {name for name in rename.values() if name in rename and rename[name] != name}:
        with pytest.raises(pl.errors.ResumeError) as caught:
            pl.load(path, model=model)
        assert_same(known(by_the_error(caught.value, model)), known(loaded), "by the call in the error")


def by_the_error(error: BaseException, model: nn.Module) -> pl.State:
    """What the call in an error loads."""
    call = re.search(r"pl\.load\(.*?\)(?=[,.;] )", str(error))
    assert call is not None, error
    state: pl.State = eval(call[0], {"pl": pl, "model": model})
    return state


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_another_head_begins_anew(tmp_path: Path, optimizer: str) -> None:
    """Its first step is that of a new optimizer; the others go on, from the State and from a file of it."""
    path, model = tmp_path / "x.safetensors", Net(classes=3)
    before = kept(Net(), 3, optimizer)
    pl.save(before, path)
    with pytest.raises(pl.errors.ResumeError, match=r"'head\.linear\.weight'.*'head\.norm\.running_var'") as caught:
        pl.load(path, model=model)
    state = by_the_error(caught.value, model)
    fresh = {name for name in model.state_dict() if name.startswith("head.")} - {"head.norm.num_batches_tracked"}
    assert {*state.notes[0].added} == fresh
    assert torch.equal(state.params["head.linear.weight"], model.head.linear.weight)
    assert torch.equal(state.params["first.linear.weight"], before.params["first.linear.weight"])
    ends = pl.run(fit(state, optimizer, batches=4, classes=3))
    begun = pl.run(fit(state.replace(opt_state=None), optimizer, batches=4, classes=3))
    assert torch.equal(ends.params["head.linear.weight"], begun.params["head.linear.weight"])
    assert not torch.equal(ends.params["second.linear.weight"], begun.params["second.linear.weight"])
    pl.save(state, tmp_path / "y.safetensors")
    again = pl.run(fit(model, optimizer, batches=4, classes=3, load_path=tmp_path / "y.safetensors"))
    assert_same(known(again), known(ends), "from a file")
    # A new parameter that no call has named is refused.
    with pytest.raises(pl.errors.ResumeError, match=r"lacks head\.linear\.bias|opt_state"):
        fit(state.replace(notes=()), optimizer, classes=3)


def test_a_migrated_run_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    old, model = tmp_path / "old", Net({"first": "stem", "second": "second", "head": "head"})
    pl.run(fit(Net(), batches=3, autoresume=old))

    def command(folder: Path, batches: int) -> pl.State:
        path = pl.latest_path(old)
        assert path is not None
        return pl.run(fit(pl.load(path, model=model, rename={"first": "stem"}), batches=batches, autoresume=folder))

    with pytest.raises(pl.errors.ResumeError, match="autoresume= then needs a folder of its own"):
        command(old, 4)
    command(tmp_path / "new", 4)
    state = command(tmp_path / "new", 5)
    assert (state.timestamp.batch, [str(note)[:42] for note in state.notes]) == (
        5,
        ["loaded from ep0-ba3.safetensors at batch 3:"[:42]],
    )
    assert_same(known(state), known(pl.run(fit(model))), "resumed")
    path = pl.latest_path(tmp_path / "new")
    assert path is not None
    back = pl.load(path, model=Net(), rename={"stem": "first"})
    assert [note.batch for note in back.notes] == [3, 5]


def test_adapters_alone_on_a_base_of_other_names(tmp_path: Path) -> None:
    """The digests of frozen parameters that the file leaves out are those under the new names."""

    def frozen(first: str) -> Net:
        model = Net({"first": first, "second": "second", "head": "head"})
        model.get_submodule(first).requires_grad_(False)
        return model

    state, path = kept(frozen("first"), 1), tmp_path / "x.safetensors"
    pl.save(state, path, trained_only=True)
    loaded = pl.load(path, model=frozen("stem"), rename={"first": "stem"})
    assert torch.equal(loaded.params["stem.linear.weight"], state.params["first.linear.weight"])
    other = frozen("stem")
    other.get_parameter("stem.linear.bias").data += 1
    with pytest.raises(pl.errors.ResumeError, match=r"params\['stem\.linear\.bias'\]"):
        pl.load(path, model=other, rename={"first": "stem"})
    state = pl.load(path, model=other, rename={"first": "stem"}, exclude="stem.linear.bias")
    assert torch.equal(state.params["stem.linear.bias"], other.get_parameter("stem.linear.bias"))


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "model."])
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("kind", ["plain", "weights", "State"])
def test_weights_under_a_prefix_and_of_another_head(tmp_path: Path, prefix: str, classes: int, kind: str) -> None:
    path, model = tmp_path / "w.safetensors", Net()
    other = Net(wrapper=prefix.removesuffix("."), classes=classes)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    if kind == "plain":
        save_file(other.state_dict(), path)
    else:
        pl.save(pl.State.create(other), path, weights_only=kind == "weights")
    if not prefix and classes == 2:
        state = pl.load(path, model=model, weights_only=True)
    else:
        for call in (lambda: pl.load(path, model=model, weights_only=True), lambda: pl.run(fit(model, load_path=path))):
            with pytest.raises(pl.errors.ResumeError) as caught:
                call()
            state = by_the_error(caught.value, model)
    for name, tensor in {**state.params, **state.buffers}.items():
        own = classes == 10 and name.startswith("head.")
        assert torch.equal(tensor, model.state_dict()[name] if own else other.state_dict()[prefix + name]), name


def test_layers_of_an_algorithm_are_named(tmp_path: Path) -> None:
    """Whether it is missing in this call, or was missing in the run that was saved; and in a module that is passed."""
    gates: Any = {"algorithms": [A.squeeze_excite(2, min_channels=3, name="gates")]}

    def images(**options: Any) -> pl.Stream:
        return problem.fit(problem.convnet(), data=problem.images(2), max_duration="1ep", **options)

    state, path, plain = pl.run(images(**gates)), tmp_path / "gated.safetensors", tmp_path / "plain.safetensors"
    (note,) = state.notes
    assert (note.source, note.removed) == ("gates", ())
    assert {*note.added} == state.params.keys() - dict(problem.convnet().named_parameters()).keys()
    pl.save(state, path)
    pl.save(pl.run(images()), plain)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: pl.load(path, model=problem.convnet()), "'gates' of the run that was saved changed these layers"),
        (lambda: pl.run(images(load_path=path)), "'gates' of the run that was saved changed these layers"),
        (lambda: pl.run(images(load_path=plain, **gates)), "'gates' in algorithms= has changed these layers at INIT"),
    ]
    for call, says in calls:
        with pytest.raises(pl.errors.ResumeError, match=says):
            call()
    assert pl.load(path, model=state.module()).notes == state.notes


class Settings:
    """What a program keeps beside its weights."""


FILES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "weights": lambda weights: weights,
    "DataParallel": lambda weights: {f"module.{name}": tensor for name, tensor in weights.items()},
    "compiled": lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
    "a module": lambda weights: problem.noisy(3),
    "Lightning": lambda weights: {"epoch": 1, "state_dict": {f"model.{name}": each for name, each in weights.items()}},
    "Composer": lambda weights: {
        "state": {"model": {f"module.{name}": each for name, each in weights.items()}, "callbacks": Settings()}
    },
    "with settings": lambda weights: {"model": weights, "optimizer": {"state": {}}, "args": Settings()},
}


def tried(call: str, names: dict[str, Any]) -> Any:
    """What a call returns, or its error."""
    try:
        return eval(call, names)
    except (pl.errors.CheckpointError, pl.errors.ResumeError) as error:
        return error


@pytest.mark.parametrize("kind", sorted(FILES))
@pytest.mark.parametrize("zipped", [True, False])
def test_the_advice_on_a_file_of_torch_works(tmp_path: Path, kind: str, zipped: bool) -> None:
    """The call that each error names is made, until one gives the State."""
    path, source, model = str(tmp_path / "a.pt"), problem.noisy(3), problem.noisy(4)
    torch.save(FILES[kind](source.state_dict()), path, _use_new_zipfile_serialization=zipped)
    names: dict[str, Any] = {"pl": pl, "torch": torch, "model": model, "path": path}
    call, state = f"pl.load({path!r}, model=model)", None
    for _ in range(4):
        if isinstance(state := tried(call, names), pl.State):
            break
        found = re.findall(r"pl\.from_composer\(.*\)(?=\.| |, and|$)", str(state))
        # What torch.load has returned is `saved`.
        call = found[0].replace("saved", call.partition("(")[2].rpartition(", model")[0])
    assert_same({**state.params, **state.buffers}, dict(source.state_dict()), kind)
    assert ("weights_only=False" in call) == (kind in ("a module", "Composer", "with settings"))


def put(tree: Any, path: list[str], value: Any) -> Any:
    return FrozenDict({**tree, path[0]: put(tree[path[0]], path[1:], value)}) if path else value


LEAVES: list[tuple[str, str, Any, str]] = [
    ("adamw", "exp_avg/0.weight", torch.zeros(5, 4, dtype=torch.int64), "has dtype torch.int64"),
    ("adamw", "exp_avg/0.weight", torch.zeros(5, 4, dtype=torch.float64), "has dtype torch.float64"),
    ("adamw", "exp_avg/0.weight", torch.zeros(1, 4), "has shape (1, 4), and its parameter (5, 4)"),
    ("adamw", "skipped/0.weight", 1.5, "is a float, and adamw needs a count"),
    ("adamw", "skipped/0.weight", -1, "is -1, and adamw needs a count"),
    ("adamw", "skipped/0.weight", torch.ones(3), "is a Tensor, and adamw needs a count"),
    ("adamw", "skipped/0.weight", None, "is a NoneType in the place of a int"),
    ("adamw", "exp_avg", FrozenDict(other=torch.zeros(5, 4)), "opt_state['exp_avg'] lacks 0.weight"),
    ("from_torch", "memory/0.weight/exp_avg", torch.zeros(5, 4, dtype=torch.int64), "is (5, 4) int64"),
    ("from_torch", "memory/0.weight/exp_avg", torch.zeros(1, 4), "is (1, 4) float32"),
    ("from_torch", "memory/0.weight/exp_avg", "text", "is a str"),
    ("from_torch", "started/0.weight", torch.ones(5), "is a Tensor, and from_torch(AdamW) needs a bool"),
]


@pytest.mark.parametrize(("optimizer", "leaf", "value", "says"), LEAVES)
def test_leaves_of_an_optimizer_state_are_named_before_training(
    optimizer: str, leaf: str, value: Any, says: str
) -> None:
    def run(start: Any, epochs: int) -> pl.Stream:
        return problem.fit(start, optimizer=OPTIMIZERS[optimizer](), max_duration=f"{epochs}ep")

    state = pl.run(run(problem.noisy(), 1))
    path = leaf.split("/")
    with pytest.raises(pl.errors.ResumeError) as caught:
        run(state.replace(opt_state=put(state.opt_state, path, value)), 2)
    assert says in str(caught.value)
    assert "opt_state['" + "']['".join(path) + "']" in str(caught.value)
