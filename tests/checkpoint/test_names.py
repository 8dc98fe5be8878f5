"""Names: of tied weights in a file of weights, of files and folders, and of arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.callbacks import CheckpointSaver
from pure_loop.errors import ResumeError
from tests.support.checkpoint_runs import fit, hidden, small
from tests.support.streams import assert_same

safetensors = pytest.importorskip("safetensors.torch")


def tied(tie: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    if tie:
        model[2].weight = model[0].weight
    return model


def weights(first: Tensor | None, second: Tensor | None) -> dict[str, Tensor]:
    """A state dict of that model with these under the two names of its tied weight."""
    found = {name: tensor.clone() for name, tensor in tied().state_dict().items()}
    for name, tensor in (("0.weight", first), ("2.weight", second)):
        found.pop(name)
        if tensor is not None:
            found[name] = tensor
    return found


NUMBERS = torch.tensor([[1.0, -0.0], [float("nan"), 2.0]])


class TestTiedWeights:
    """Two names of one weight: a file that says different things of it is refused, by both names.

    Tried besides: other signs of zero, NaNs, shapes and dtypes; names in either order; ``strict=False``; weights of a
    checkpoint of a model that isn't tied; a tie in the file that is none in the model; a tied buffer.
    """

    def load(
        self, folder: Path, tensors: dict[str, Tensor], model: nn.Module | None = None, **options: Any
    ) -> pl.State:
        safetensors.save_file(tensors, folder / "w.safetensors")
        return pl.load(folder / "w.safetensors", model=model or tied(), **options)

    @pytest.mark.parametrize(
        "other",
        [
            NUMBERS + 1,
            torch.tensor([[1.0, 0.0], [float("nan"), 2.0]]),
            NUMBERS.double(),
            NUMBERS.half(),
            NUMBERS.int(),
            NUMBERS[:1].clone(),
            NUMBERS.view(4).clone(),
            NUMBERS[:0],
        ],
        ids=["numbers", "sign", "double", "half", "int", "row", "shape", "empty"],
    )
    @pytest.mark.parametrize("strict", [True, False])
    def test_that_differ(self, tmp_path: Path, other: Tensor, strict: bool) -> None:
        for pair in ((NUMBERS, other), (other, NUMBERS)):
            with pytest.raises(
                ResumeError, match=r"'(0|2).weight' and '(0|2).weight' are one tied weight of Sequential"
            ):
                self.load(tmp_path, weights(*pair), weights_only=True, strict=strict)
            with pytest.raises(ResumeError, match="are one tied weight"):
                list(self.stream(tmp_path))

    def stream(self, folder: Path) -> Any:
        data = [(torch.zeros(2, 2), torch.zeros(2, 2))]
        for pair in pl.fit(
            tied(),
            data,
            loss=nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            load_path=folder / "w.safetensors",
        ):
            yield pair
            if pair[0] is pl.Event.AFTER_LOAD:
                break

    @pytest.mark.parametrize(
        "pair", [(NUMBERS, NUMBERS.clone()), (NUMBERS, None), (None, NUMBERS)], ids=["both", "1", "2"]
    )
    def test_that_agree(self, tmp_path: Path, pair: tuple[Tensor | None, Tensor | None]) -> None:
        state = self.load(tmp_path, weights(*pair))
        assert torch.equal(state.params["0.weight"].view(torch.int32), NUMBERS.view(torch.int32))

    def test_of_a_checkpoint(self, tmp_path: Path) -> None:
        pl.save(pl.State.create(tied(tie=False)), tmp_path / "x.safetensors")
        with pytest.raises(ResumeError, match="are one tied weight of Sequential, and the file has other numbers"):
            pl.load(tmp_path / "x.safetensors", model=tied(), weights_only=True)

    def test_a_tie_of_the_file_alone(self, tmp_path: Path) -> None:
        """safetensors' own ``save_model`` writes one of the names: the other is missing where it is another weight."""
        safetensors.save_model(tied(), str(tmp_path / "m.safetensors"))
        assert_same(pl.load(tmp_path / "m.safetensors", model=tied()).params, pl.State.create(tied()).params, "tied")
        with pytest.raises(ResumeError, match=r"the file lacks .'(0|2)\.weight'"):
            pl.load(tmp_path / "m.safetensors", model=tied(tie=False))

    def test_buffers(self, tmp_path: Path) -> None:
        model = tied()
        model[1].register_buffer("again", model[1].running_mean)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors.pop("2.weight")
        self.load(tmp_path, tensors, model)
        tensors["1.again"] = tensors["1.again"] + 1
        with pytest.raises(ResumeError, match="are one tied weight"):
            self.load(tmp_path, tensors, model)


IMPOSSIBLE = ("a\0b", "\0", "run/\0/x.safetensors", "\ud800.safetensors", "memory://a\0b")


class TestPaths:
    """A path that none can be is refused at the call, and any name that the file system has can be saved to."""

    @pytest.mark.parametrize("path", IMPOSSIBLE, ids=ascii)
    def test_impossible(self, path: str) -> None:
        state = pl.State.create(small())
        calls: list[Callable[[], Any]] = [
            lambda: pl.load(path, model=small()),
            lambda: pl.save(state, path),
            lambda: pl.latest(path),
            lambda: pl.checkpoint.describe(path),
            lambda: CheckpointSaver(path),
            lambda: fit(small(), load_path=path),
            lambda: fit(small(), autoresume=path),
        ]
        for call in calls:
            with pytest.raises(pl.ArgumentError, match="which no file name can"):
                call()

    @pytest.mark.parametrize("name", ["a" * 243, "é" * 121 + "a", "字" * 81], ids=["ascii", "two bytes", "three bytes"])
    def test_the_longest_names(self, tmp_path: Path, name: str) -> None:
        state = pl.State.create(small(), seed=3)
        for path in (tmp_path / f"{name}.safetensors", tmp_path / "é" / name / name / f"{name}.safetensors"):
            assert len(os.fsencode(path.name)) == 255
            pl.save(state, path)
            assert pl.load(path, model=small()).seed == 3
        assert pl.latest(tmp_path) == str(tmp_path / f"{name}.safetensors")
        assert not hidden(tmp_path)

    def test_names_that_are_too_long(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        state, path = pl.State.create(small()), tmp_path / ("a" * 256)
        with pytest.raises(pl.CheckpointWriteError, match="at most 255 bytes on most file systems: give a shorter one"):
            pl.save(state, path)
        with pytest.raises(pl.CheckpointError, match="File name too long"):
            pl.load(path, model=small())
        assert not list(tmp_path.iterdir())
        for filename in ("a" * 256 + "{batch}.safetensors", "a" * 242 + "{batch}.safetensors"):
            with pytest.raises(pl.ArgumentError, match="255 bytes"):
                CheckpointSaver(tmp_path, filename=filename)
        for latest in ("a\0b", "a" * 256, "..", "a/b", "", "\ud800"):
            with pytest.raises(pl.ArgumentError, match="the name of a link in the folder"):
                CheckpointSaver(tmp_path, latest=latest)

    def test_a_saver_with_long_names(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        saver = CheckpointSaver(tmp_path, filename="a" * 230 + "{batch}.safetensors", latest="b" * 255)
        pl.run(fit(small(), callbacks=[saver]))
        assert pl.latest(tmp_path) == str(tmp_path / ("a" * 230 + "8.safetensors"))
        assert (tmp_path / ("b" * 255)).resolve().name == "a" * 230 + "8.safetensors"
        assert not hidden(tmp_path)
