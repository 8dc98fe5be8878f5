"""What is refused at a call that saves, loads, finds or configures checkpoints, and what the error says to write."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop.callbacks import CheckpointSaver
from tests.support.checkpoint_runs import DATA, fit, small
from tests.support.problem import cross_entropy
from tests.support.refused import Refusal, check, rows

WRONG, TYPE, OTHER = pl.errors.ArgumentError, pl.errors.ArgumentTypeError, pl.errors.ResumeError


class Strange:
    pass


class NotRegistered(NamedTuple):
    x: int


def state() -> pl.State:
    return pl.State.create(small())


def saver(error: type[Exception], says: str, **arguments: Any) -> Refusal:
    name = " ".join(f"{key}={value!r}" for key, value in arguments.items())
    return Refusal(name, lambda: CheckpointSaver(**{"folder": "x", **arguments}), error, (says,))


def holds(name: str, value: Any, *says: str) -> Refusal:
    return Refusal(f"a State with {name}", lambda: pl.save(state().remember("mine", value), "y"), TYPE, says)


def loads(name: str, error: type[Exception], *says: str, **options: Any) -> Refusal:
    options = {"model": small(), **options}
    return Refusal(name, lambda: pl.load("x.safetensors", **options), error, says)


def weights(name: str, error: type[Exception], *says: str, tensors: dict[str, Any], **options: Any) -> Refusal:
    def call() -> Any:
        save_file(tensors, "w.safetensors")
        return pl.load("w.safetensors", **{"model": nn.Linear(2, 3), "weights_only": True, **options})

    return Refusal(name, call, error, says)


def of(folder: str = "run", **options: Any) -> Any:
    """A run with a saver, which has those options that are its own."""
    own = {name: options.pop(name) for name in list(options) if name in inspect.signature(CheckpointSaver).parameters}
    fields = {name.removeprefix("fit_"): value for name, value in options.items()}
    return fit(**{"callbacks": [CheckpointSaver(folder, **own)], **fields})


def runs(says: str, error: type[Exception] = WRONG, **options: Any) -> Refusal:
    return Refusal(
        " ".join(f"{name}={value!r:.20}" for name, value in options.items()), lambda: of(**options), error, (says,)
    )


ACCURACY: dict[str, Any] = {"keep_best": 1, "metric": "val/accuracy", "mode": "max"}
REGRESSION = [(inputs, torch.zeros(4, 3)) for inputs, _ in DATA]
DEEP: list[Any] = []
DEEP.append(DEEP)
ONES = torch.ones(3, 2)
SELECTION = {"weights_only": True}
REFUSED = [
    saver(TYPE, "3 is no path", folder=3),
    saver(WRONG, "the path is empty", folder=""),
    saver(TYPE, "how often to save", interval=None),
    saver(WRONG, "interval='1x'", interval="1x"),
    saver(WRONG, "there are epoch, batch", filename="{loss}.safetensors"),
    saver(WRONG, "a name in the folder", filename="../{batch}.safetensors"),
    saver(WRONG, "ends with '.safetensors'", filename="{batch}.pt"),
    saver(WRONG, "in digits alone", filename="{epoch:,}.safetensors"),
    saver(WRONG, "255 bytes", filename="a" * 242 + "{batch}.safetensors"),
    saver(WRONG, "at least one checkpoint has to stay", keep_last=0),
    saver(TYPE, "a whole number", keep_last=1.5),
    saver(WRONG, '"val/accuracy"', keep_best=1),
    saver(WRONG, "label of an evaluator", keep_best=1, metric="loss", mode="min"),
    saver(WRONG, 'mode="max"', keep_best=1, metric="val/reward"),
    saver(WRONG, "keep_best=1 keeps the best", metric="val/loss"),
    saver(WRONG, "name of a link", latest="a/b"),
    saver(WRONG, "name of a link", latest="a" * 256),
    saver(WRONG, "those of checkpoints", latest="x.safetensors"),
    saver(WRONG, "name of a link", best=3),
    saver(WRONG, "a name of its own", best="latest"),
    saver(TYPE, "weights_only", weights_only=1),
    saver(TYPE, "trained_only", trained_only="yes"),
    saver(TYPE, "signals=15: write a list", signals=15),
    saver(TYPE, "signals='USR1': write a list", signals="USR1"),
    saver(TYPE, "signals=[True]: write a list", signals=[True]),
    saver(WRONG, "'USR3' is no signal of this system; did you mean 'USR", signals=["USR3"]),
    saver(WRONG, "can't be caught by any program", signals=[signal.SIGKILL]),
    saver(WRONG, "0 is no signal", signals=[0]),
    saver(WRONG, "1000000000 is no signal", signals=[10**9]),
    saver(WRONG, "where a worker of a DataLoader ends", signals=["CHLD"]),
    saver(WRONG, "a fault of the program", signals=["SEGV"]),
    saver(WRONG, "stop_before='10ba': a time limit goes by the clock", stop_before="10ba"),
    saver(WRONG, "no time at all", stop_before="0s"),
    saver(WRONG, 'write wall-clock time: "90s", "1.5s", "30m", "1h30m", "1d2h"', stop_before="19h50"),
    saver(TYPE, "stop_before=1.5", stop_before=1.5),
    saver(TYPE, 'stop_before="19h50m"', time_limit=1),
    saver(TYPE, "weights_only=True", save_weights_only=True),
    # Savers in a run
    runs("'val/accurracy' is not measured; there are val/loss, val/acc", **ACCURACY | {"metric": "val/accurracy"}),
    runs("no evaluator 'test' in evaluators=; there are val", keep_best=1, metric="test/loss", mode="min"),
    runs("order='2021' has no checkpoint events", order="2021"),
    runs("iteration_length is not given", interval="1iter"),
    runs("whole States: give it a folder", weights_only=True, autoresume="run"),
    runs("saves nothing that training resumes from", autoresume=CheckpointSaver("run", weights_only=True)),
    runs("pass the folder", autoresume="x.safetensors"),
    runs("autoresume=CheckpointSaver(...)", autoresume=pl.callbacks.SpeedMonitor(), error=TYPE),
    runs("autoresume=pl.callbacks.CheckpointSaver(", fit_keep_last=2, error=TYPE),
    runs("under the same names", callbacks=[CheckpointSaver("run"), CheckpointSaver("run/", interval="4ba")]),
    Refusal("an evaluation", lambda: pl.evaluate(state(), DATA, loss=cross_entropy, callbacks=[CheckpointSaver("run")]),
            WRONG, ("evaluate has no checkpoint events",)),
    Refusal("a metric of other outputs",
            lambda: of(**ACCURACY, evaluators={"val": REGRESSION}, data=REGRESSION, loss=mse_loss),
            WRONG, ("metric='val/accuracy' is not measured; there are val/loss",), False),
    Refusal("a folder in a file", lambda: of(folder="x.safetensors/run"), pl.errors.CheckpointWriteError,
            ("no file can be written to the folder", "x.safetensors/run"), at_once=False),
    Refusal("a memory that no file can hold",
            lambda: of(algorithms=[pl.Algorithm("odd", {pl.Event.BATCH_END: lambda s: s}, init=lambda s: object())]),
            TYPE, ("state.algorithm_state.odd is a builtins.object",), at_once=False),
    # What can't be saved
    holds("an object", {"a": [1, Strange()]}, "state.algorithm_state.mine.a.1 is a", "Strange", "keep a tensor"),
    holds("a record", NotRegistered(1), "pl.checkpoint.register(NotRegistered)"),
    holds("a tensor without numbers", torch.ones(2, device="meta"), "on the meta device"),
    holds("a sparse tensor", torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    holds("texts of NumPy", np.array(["a"]), "a NumPy array of dtype"),
    holds("a value too deep", DEEP, "nested more than 100 deep"),
    holds("an integer too long", 10**5000, "state.algorithm_state.mine is an integer of more than 4300 digits"),
    Refusal("a name of torch.save", lambda: pl.save(state(), "y/a.pt"), WRONG, ("write 'y/a.safetensors'",)),
    Refusal("a path first", lambda: pl.save("x", state()), TYPE, ("write save(state, path)",)),  # type: ignore[arg-type]
    Refusal("no path at all", lambda: pl.save(state()), TYPE, ("save needs path",)),  # type: ignore[call-arg]
    Refusal("notes that are none", lambda: pl.save(state(), "y", notes=5), TYPE, ("a dict of what JSON has",)),  # type: ignore[arg-type]
    Refusal("notes with NaN", lambda: pl.save(state(), "y", notes={"a": float("nan")}), TYPE, ("JSON has",)),
    Refusal("notes with a tuple", lambda: pl.save(state(), "y", notes={"a": (1,)}), TYPE, ("JSON has",)),
    Refusal("nothing frozen", lambda: pl.save(state(), "y", trained_only=True), WRONG, ("are trained: freeze some",)),
    Refusal("another name", lambda: pl.save(state(), "y", trainable_only=True), TYPE, ("trained_only=True",)),  # type: ignore[call-arg]
    Refusal(
        "weights of a dtype that the format lacks",
        lambda: pl.save(pl.State.create(nn.Linear(2, 1, dtype=torch.complex128)), "y", weights_only=True),
        TYPE,
        ("state.params['weight'] has dtype torch.complex128",),
    ),
    # What can't be loaded so
    loads("no model", TYPE, "give the module that was trained", model=None),
    loads("a state dict as the model", TYPE, "was given a OrderedDict", model=small().state_dict()),
    loads("another argument", TYPE, "load has no argument 'module'", "model=module", module=1),
    loads("a name of torch", TYPE, 'write device="cpu"', map_location="cpu"),
    loads("another name of exclude", TYPE, 'exclude=["head.*"]', load_ignore_keys=1),
    loads("another name of rename", TYPE, 'rename={"backbone.": "encoder."}', key_mapping=1),
    loads("a device that isn't there", WRONG, "device='cud' can't be used here", device="cud"),
    loads("a State that isn't strict", WRONG, "weights_only=True", strict=False),
    loads("a State renamed to a name that it has", WRONG, "both become '1.weight'", rename={"0.": "1."}),
    loads("a State renamed from nothing", WRONG, "no weight of x.safetensors begins with '7.'", rename={"7.": "1."}),
    loads("a field left out", WRONG, "exclude='seed' matches no weight of", exclude=["seed"]),
    loads("parts of a field left out", WRONG, "write 'opt_state' or 'algorithm_state/NAME'", exclude=["opt_state/x"]),
    loads("no such memory", WRONG, "did you mean 'algorithm_state/ema'?", exclude=["algorithm_state/emma"]),
    loads("no glob", TYPE, "exclude=[5]: write globs", exclude=[5], **SELECTION),
    loads("an empty glob", TYPE, "write globs", exclude=[""], **SELECTION),
    loads("a module without a glob", WRONG, "did you mean '4.*'?", exclude=["4"], **SELECTION),
    loads("a glob of nothing", WRONG, "exclude='4.wieght' matches no weight of", "did you mean '4.weight'?",
          exclude=["4.wieght"], **SELECTION),
    loads("no renaming", TYPE, "rename=['a']: write", rename=["a"], **SELECTION),
    loads("a renaming to a number", TYPE, "rename={'a': 1}: write", rename={"a": 1}, **SELECTION),
    loads("a renaming without a name", TYPE, "can't be called with one argument", rename=lambda: "a", **SELECTION),
    loads("a renaming to None", TYPE, "returned None: return the name", rename=lambda name: None, **SELECTION),
    loads("a renaming of nothing", WRONG, "begins with 'back'", rename={"back": "a"}, **SELECTION),
    loads("two names that become one", WRONG, "both become 'same'", rename=lambda name: "same", **SELECTION),
    weights("names missing and unknown", OTHER, "the file lacks ['bias']; the model lacks ['extra']",
            tensors={"weight": ONES, "extra": torch.ones(1)}),
    weights("another shape", OTHER, "'weight' has shape (3, 2) in the file and (3, 4)",
            tensors={"weight": ONES}, model=nn.Linear(4, 3), strict=False),
    weights("another kind of number", OTHER, "'weight' has dtype torch.int8 in the file and torch.float32",
            tensors={"weight": ONES.to(torch.int8)}, strict=False),
    weights("nothing of the model", OTHER, "other weights than Linear", tensors={"other": ONES}, strict=False),
    Refusal("a description of weights alone", lambda: (save_file({"w": ONES}, "w.safetensors"),
            pl.checkpoint.describe("w.safetensors")), pl.errors.CheckpointError, ("weights alone",)),
    Refusal("no folder", lambda: pl.latest_path(), TYPE, ("latest_path needs folder",)),  # type: ignore[call-arg]
    Refusal("another mode", lambda: pl.best_path(".", mode="least"), WRONG, ("mode='least'",)),  # type: ignore[arg-type]
    Refusal("a protocol unknown", lambda: pl.latest_path("carrier-pigeon://home"), WRONG, ("carrier-pigeon://home",)),
    Refusal("a class that is no record", lambda: pl.checkpoint.register(Strange), TYPE, ("give an attrs class",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small(), max_duration="1ba"))


@rows(REFUSED)
def test_it_is_refused_and_nothing_is_left(
    refusal: Refusal, trained: pl.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pl.save(trained, "x.safetensors")
    check(refusal)
    left = {path.name for path in tmp_path.iterdir()} - {"x.safetensors", "w.safetensors", "run"}
    assert not left
