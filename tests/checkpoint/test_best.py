"""pl.best, and the link to the best checkpoint: of one run, a resumed one, ranks and remote folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.storage import storage_of
from tests.support.checkpoint_runs import fit, messages, small
from tests.support.sharding import batches, network, pool, train

BATCHES = 8  # of a run


def saver(folder: Any, mode: Any = "min", **options: Any) -> CheckpointSaver:
    settings = {"interval": "1ba", "filename": "{batch}.safetensors", "keep_last": 1, "keep_best": 1, **options}
    return CheckpointSaver(folder, metric="val/loss", mode=mode, **settings)


def run(folder: Any, mode: Any = "min", **options: Any) -> Any:
    settings = {"callbacks": [saver(folder, mode)], "eval_interval": "1ba", **options}
    return fit(small(), **settings)


def scores(stream: Any) -> dict[int, float]:
    return {s.timestamp.batch: float(s.metrics["val"]["loss"]) for e, s in stream if e is Event.EVAL_AFTER_ALL}


@pytest.fixture(params=["local", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_is_found_by_the_scores_that_were_saved(anywhere: str, mode: Any) -> None:
    assert pl.best(anywhere) is None
    measured = scores(run(anywhere, mode))
    best = {"min": min, "max": max}[mode](measured, key=measured.__getitem__)
    assert len(set(measured.values())) == BATCHES
    assert 0 < best < BATCHES, "neither the newest nor all"
    assert pl.best(anywhere) == f"{anywhere}/{best}.safetensors"
    state = pl.load(pl.best(anywhere), model=small())  # type: ignore[arg-type]
    assert float(state.metrics["val"]["loss"]) == measured[best]
    if "://" in anywhere:  # where there are no links
        with storage_of(f"{anywhere}/best").open() as file:
            assert file.read().decode() == f"{best}.safetensors\n"
        assert not storage_of(f"{anywhere}/latest").exists()
    else:
        assert os.readlink(f"{anywhere}/best") == f"{best}.safetensors"
        assert pl.load(f"{anywhere}/best", model=small()).timestamp.batch == best


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("stop", [3])
def test_a_resumed_run_has_the_best_of_both_parts(anywhere: str, mode: Any, stop: int) -> None:
    for event, state in run(anywhere, mode):
        if event is Event.BATCH_START and state.timestamp.batch == stop:
            break
    resumed = run(anywhere, mode, autoresume=anywhere)
    pl.run(resumed)
    measured = scores(run(f"{anywhere}/whole", mode))
    best = {"min": min, "max": max}[mode](measured, key=measured.__getitem__)
    assert pl.best(anywhere) == f"{anywhere}/{best}.safetensors"
    if "://" not in anywhere:
        assert os.readlink(f"{anywhere}/best") == f"{best}.safetensors"


def test_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    measured = scores(run(tmp_path, callbacks=[saver(tmp_path, keep_last=BATCHES)]))
    first, second, *_ = sorted(measured, key=measured.__getitem__)
    raw = bytearray((tmp_path / f"{first}.safetensors").read_bytes())
    raw[-9] ^= 1
    (tmp_path / f"{first}.safetensors").write_bytes(raw)
    with messages() as said:
        assert pl.best(tmp_path) == str(tmp_path / f"{second}.safetensors")
    assert f"{first}.safetensors is passed over" in said[0]


def test_the_end_of_an_epoch_is_taken_for_its_last_batch(tmp_path: Path) -> None:
    state = pl.run(fit(small()))
    for name, event in (("z", Event.BATCH_CHECKPOINT), ("a", Event.EPOCH_CHECKPOINT)):
        kept = next(s for e, s in fit(small(), donate=False) if e is event and s.timestamp.batch == 4)
        pl.save(kept, tmp_path / f"{name}.safetensors", notes={"metric": "m", "mode": "max", "score": 0.5})
    pl.save(state, tmp_path / "later.safetensors", notes={"metric": "m", "mode": "max", "score": 0.5})
    assert pl.best(tmp_path) == str(tmp_path / "a.safetensors")


def test_several_metrics_are_told_apart(tmp_path: Path) -> None:
    state = pl.State.create(small())
    for index, (metric, mode, score) in enumerate(
        [("val/f1", "max", 0.5), ("val/loss", "min", 0.5), ("val/loss", "min", 0.25)]
    ):
        pl.save(state, tmp_path / f"{index}.safetensors", notes={"metric": metric, "mode": mode, "score": score})
    with pytest.raises(pl.ArgumentError, match=r"has scores of val/f1, val/loss: say by which, metric='val/f1'"):
        pl.best(tmp_path)
    assert pl.best(tmp_path, metric="val/loss") == str(tmp_path / "2.safetensors")
    assert pl.best(tmp_path, metric="val/loss", mode="max") == str(tmp_path / "1.safetensors")
    with pytest.raises(pl.ArgumentError, match=r"did you mean 'val/loss'\?; there are val/f1, val/loss"):
        pl.best(tmp_path, metric="val/los")


def test_what_is_not_known_is_asked_for(tmp_path: Path) -> None:
    state = pl.State.create(small())
    pl.save(state, tmp_path / "none.safetensors")
    assert pl.best(tmp_path) is None
    pl.save(state, tmp_path / "some.safetensors", notes={"metric": "val/loss", "score": 0.5})
    with pytest.raises(pl.ArgumentError, match='write mode="max" or mode="min"'):
        pl.best(tmp_path)
    assert pl.best(tmp_path, mode="min") == str(tmp_path / "some.safetensors")
    with pytest.raises(pl.ArgumentError, match="mode='least'"):
        pl.best(tmp_path, mode="least")  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentError, match="is a file"):
        pl.best(tmp_path / "some.safetensors")
    with pytest.raises(pl.ArgumentTypeError, match="no path"):
        pl.best(3)  # type: ignore[arg-type]


def test_names_of_links(tmp_path: Path) -> None:
    pl.run(run(tmp_path, callbacks=[saver(tmp_path, best="least-loss", latest=None)]))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["least-loss"]
    pl.run(run(tmp_path / "none", callbacks=[saver(tmp_path / "none", best=None, latest=None)]))
    pl.run(run(tmp_path / "newest", callbacks=[CheckpointSaver(tmp_path / "newest")]))
    assert [path.name for name in ("none", "newest") for path in (tmp_path / name).iterdir() if path.is_symlink()] == [
        "latest"
    ]
    for options in ({"best": "a/b"}, {"best": "x.safetensors"}, {"best": "x.sharded"}, {"best": "latest"}, {"best": 3}):
        with pytest.raises(pl.ArgumentError, match="best="):
            saver(tmp_path, **options)
    two = [saver(tmp_path), saver(tmp_path, filename="other-{batch}.safetensors")]
    with pytest.raises(pl.ArgumentError, match=r"link to their best in .* under one name"):
        run(tmp_path, callbacks=two)


def test_what_has_the_links_name_stays(anywhere: str) -> None:
    with storage_of(f"{anywhere}/best").writing() as file:
        file.write(b"precious")
    with pytest.raises(pl.ArgumentError, match=r"best='best': .* is no link, and stays as it is"):
        pl.run(run(anywhere))
    with storage_of(f"{anywhere}/best").open() as file:
        assert file.read() == b"precious"


def test_a_folder_that_cant_have_links_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    for overwrite in (False, True):  # the second run replaces it
        pl.run(run(tmp_path, callbacks=[saver(tmp_path, overwrite=overwrite)]))
    best = pl.best(tmp_path)
    assert best == str(tmp_path / (tmp_path / "best").read_text().removesuffix("\n"))


@pytest.mark.slow
def test_the_best_of_parts_and_of_replicas(tmp_path: Path) -> None:
    """All ranks find the same, and the first one links to it."""

    def program(rank: int) -> dict[str, Any]:
        found = {}
        for parallel in ("shard", "replicate"):
            folder = tmp_path / parallel
            kept = saver(folder)
            stream = train(
                network(), parallel=parallel, callbacks=[kept], eval_interval="1ba", evaluators={"val": batches()[:1]}
            )
            measured = scores(stream)
            torch.distributed.barrier()
            found[parallel] = pl.best(folder), os.readlink(folder / "best"), min(measured, key=measured.__getitem__)
        return found

    one, two = pool().run(program)
    assert one == two
    for parallel, ending in (("shard", "sharded"), ("replicate", "safetensors")):
        path, link, batch = one[parallel]
        assert path == str(tmp_path / parallel / f"{batch}.{ending}")
        assert link == f"{batch}.{ending}"
