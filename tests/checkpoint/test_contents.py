"""Savers that leave a part of the State out: what is in their files, and that no run resumes from them unawares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.callbacks import CheckpointSaver
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from tests.support.problem import fit, mlp
from tests.support.refused import Refusal, check, rows

MOMENTS, AVERAGE = "opt_state", "algorithm_state/ema"


def averaging(model: Any = None, **changes: Any) -> pl.Stream:
    optimizer = pl.optim.adamw(lr=0.1)
    return fit(model, algorithms=[pl.algorithms.ema("4ba")], optimizer=optimizer, max_duration="2ep", **changes)


@pytest.mark.parametrize("exclude", [[MOMENTS], [AVERAGE], [MOMENTS, AVERAGE], ["algorithm_state/*"], MOMENTS])
def test_what_is_left_out_begins_anew_when_that_is_written_alone(exclude: Any, tmp_path: Path) -> None:
    whole = pl.run(averaging(callbacks=CheckpointSaver(tmp_path / "whole")))
    left_out = pl.run(averaging(callbacks=CheckpointSaver(tmp_path / "less", exclude=exclude)))
    size, less = (Path(str(pl.latest_path(tmp_path / name))) for name in ("whole", "less"))
    assert less.stat().st_size < size.stat().st_size, "the saver only observes, and its files are smaller"
    assert all(whole.params[name].equal(tensor) for name, tensor in left_out.params.items())
    names = [name for name in (MOMENTS, AVERAGE) if name in exclude or (name == AVERAGE and "*" in str(exclude))]
    for call in (
        lambda: pl.load(less, model=mlp()),
        lambda: averaging(load_path=less),
        lambda: averaging(autoresume=tmp_path / "less"),
    ):
        with pytest.raises(ResumeError, match="was saved without " + ", ".join(names)) as caught:
            call()
    assert f"exclude={names}" in str(caught.value)
    for name in names if len(names) > 1 else []:
        with pytest.raises(ResumeError, match="was saved without "):
            pl.load(less, model=mlp(), exclude=[name])
    state = pl.load(less, model=mlp(), exclude=names)
    assert (state.opt_state is None, "ema" in state.algorithm_state) == (MOMENTS in names, AVERAGE not in names)
    assert pl.run(averaging(state.replace(timestamp=state.timestamp.replace(max_duration=None)))).timestamp.epoch == 2
    assert pl.load(less, model=mlp(), weights_only=True).timestamp.batch == 0


def saving(**options: Any) -> Any:
    run = {name: options.pop(name) for name in ("autoresume",) if name in options}
    return averaging(callbacks=CheckpointSaver("run", **options), **run)


REFUSED = [
    Refusal("weights", lambda: saving(exclude="params"), ArgumentError, ("exclude='params'", "trained_only=True")),
    Refusal("a number", lambda: saving(exclude=3), ArgumentTypeError, ("exclude=3", '["opt_state"')),
    Refusal("twice", lambda: saving(exclude=MOMENTS, weights_only=True), ArgumentError, ("leaves that out",)),
    Refusal("no such state", lambda: saving(exclude="algorithm_state/emma"), ArgumentError, (f"mean {AVERAGE!r}",),
            at_once=False),
    Refusal("to resume from", lambda: saving(exclude=MOMENTS, autoresume="run"), ArgumentError, ("exclude=['opt_",)),
    Refusal("resumed by itself", lambda: averaging(autoresume=CheckpointSaver("run", exclude=MOMENTS)),
            ArgumentError, ("nothing that training resumes from",)),
]  # fmt: skip


@rows(REFUSED)
def test_it_is_refused(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(refusal)
