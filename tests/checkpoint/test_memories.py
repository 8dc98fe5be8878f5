"""What algorithms have remembered, and other tensors of a State, of shapes that they can't have: refused by leaf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import fit, small
from tests.support.hostile import document_of, rewritten
from tests.support.streams import assert_same


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small()))


def average(state: pl.State, name: str, tensor: Any, kind: str = "params") -> pl.State:
    """The State with this in the place of an average."""
    memory = state.algorithm_state["ema"]
    return state.remember("ema", {**memory, kind: {**memory[kind], name: tensor}})


def without(state: pl.State, name: str) -> pl.State:
    memory = state.algorithm_state["ema"]
    return state.remember("ema", {**memory, "params": {k: v for k, v in memory["params"].items() if k != name}})


WRONG: dict[str, Callable[[pl.State], pl.State]] = {
    "one number": lambda state: average(state, "0.weight", torch.zeros(1)),
    "a scalar": lambda state: average(state, "0.weight", torch.zeros(())),
    "a dimension more": lambda state: average(state, "0.weight", torch.zeros(2, 3, 2)),
    "a dimension of 1": lambda state: average(state, "0.weight", torch.zeros(1, 2)),
    "transposed": lambda state: average(state, "0.weight", torch.zeros(2, 3)),
    "integers": lambda state: average(state, "0.weight", torch.zeros(3, 2, dtype=torch.int32)),
    "complex": lambda state: average(state, "0.weight", torch.zeros(3, 2, dtype=torch.complex64)),
    "half": lambda state: average(state, "0.weight", torch.zeros(3, 2, dtype=torch.float16)),
    "a number": lambda state: average(state, "0.weight", 0.5),
    "none": lambda state: average(state, "0.weight", None),
    "a list": lambda state: average(state, "0.weight", [torch.zeros(3, 2)]),
    "missing": lambda state: without(state, "0.weight"),
    "of a buffer": lambda state: average(state, "1.running_mean", torch.zeros(1), "buffers"),
    "of nothing": lambda state: average(state, "9.weight", torch.zeros(1)),
}


class TestAverages:
    """An average that doesn't fit its parameter would be broadcast, and train on.

    Refused are other shapes (of fewer, more and exchanged dimensions, that broadcast and that don't), other kinds of
    numbers and narrower ones, missing and unknown names; in a State that was kept, from a file by each way to load it,
    and in evaluation and prediction.
    """

    @pytest.mark.parametrize("name", WRONG)
    def test_refused(self, name: str, trained: pl.State, tmp_path: Path) -> None:
        wrong, path = WRONG[name](trained), tmp_path / "x.safetensors"
        pl.save(wrong, path)
        for attempt in (
            lambda: fit(wrong, max_duration="3ep"),
            lambda: fit(pl.load(path, model=small()), max_duration="3ep"),
            lambda: fit(small(), load_path=path, max_duration="3ep"),
            lambda: fit(small(), autoresume=tmp_path, max_duration="3ep"),
            lambda: pl.evaluate(
                wrong,
                [(torch.zeros(1, 2), torch.zeros(1, 1))],
                loss=nn.functional.mse_loss,
                algorithms=[pl.algorithms.ema(half_life="3ba")],
            ),
            lambda: pl.predict(wrong, [(torch.zeros(1, 2),)], algorithms=[pl.algorithms.ema(half_life="3ba")]),
        ):
            with pytest.raises(ResumeError, match=r"algorithm_state\['ema'\]\['(params|buffers)'\]\['\w\.\w+'\] is"):
                attempt()

    def test_averaged(self, trained: pl.State) -> None:
        with pytest.raises(ResumeError, match=r"average of params\['0.weight'\] has shape \(1,\), and the parameter"):
            pl.algorithms.averaged(WRONG["one number"](trained))

    def test_what_fits_is_taken(self, trained: pl.State, tmp_path: Path) -> None:
        """Of half precision an average is kept in float32; a State without a memory begins with a new one."""
        model = small().bfloat16()
        data = [(torch.ones(4, 2, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.bfloat16))] * 3
        options: dict[str, Any] = {
            "loss": nn.functional.mse_loss,
            "optimizer": pl.optim.sgd(lr=0.1),
            "algorithms": [pl.algorithms.ema(half_life="3ba")],
        }
        state = pl.run(pl.fit(model, data, max_duration="1ep", **options))
        assert state.algorithm_state["ema"]["params"]["0.weight"].dtype is torch.float32
        pl.save(state, tmp_path / "x.safetensors")
        wanted = pl.run(pl.fit(model, data, max_duration="2ep", **options))
        assert_same(
            pl.run(pl.fit(model, data, max_duration="2ep", load_path=tmp_path / "x.safetensors", **options)), wanted, ""
        )
        pl.run(fit(trained.replace(algorithm_state={}), max_duration="3ep"))


def resumed(init: Callable[[pl.State], Any], memory: Any) -> pl.State:
    """What training does with a State that has this memory, of an algorithm with this ``init``."""
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, init=init)
    state = pl.run(fit(small(), algorithms=[]))
    return pl.run(fit(state.remember("mine", memory), algorithms=[algorithm], max_duration="3ep"))


REFUSED: dict[str, tuple[Callable[[pl.State], Any], Any]] = {
    "a list of momenta": (lambda s: [torch.zeros_like(p) for p in s.params.values()], [torch.zeros(1)] * 6),
    "a counter": (lambda s: torch.zeros((), dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
    "a counter of floats": (lambda s: torch.zeros((), dtype=torch.int64), torch.zeros(())),
    "a window": (lambda s: {"last": torch.zeros(5)}, {"last": torch.zeros(4)}),
    "a history of pairs": (lambda s: torch.zeros(0, 2), torch.zeros(7, 3)),
    "a history of vectors": (lambda s: torch.zeros(0), torch.zeros(7, 3)),
}
TAKEN: dict[str, tuple[Callable[[pl.State], Any], Any]] = {
    "a history": (lambda s: torch.zeros(0, 2), torch.zeros(7, 2)),
    "a list that grows": (lambda s: [], [torch.zeros(2), torch.zeros(3)]),
    "a dict that is filled": (lambda s: {}, {"0.weight": torch.zeros(1), "any": 3}),
    "a number that became a tensor": (lambda s: 0, torch.zeros(3)),
    "a number": (lambda s: 0, 7.5),
    "nothing at first": (lambda s: None, {"x": torch.zeros(9)}),
    "a wider counter": (lambda s: torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int64)),
    "an init that reads numbers": (lambda s: torch.zeros(int(s.params["0.weight"].sum() * 0) + 3), torch.zeros(4)),
    "an init for another State": (lambda s: 1 / 0, torch.zeros(4)),
    "layers as they thaw": (
        lambda s: {"0.weight": torch.zeros(3, 2)},
        dict.fromkeys(["0.weight", "0.bias"], torch.zeros(3, 2)),
    ),
}


class TestOthers:
    """Memories of algorithms of any kind: what may differ from what ``init`` gives, and what may not."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_refused(self, name: str) -> None:
        with pytest.raises(ResumeError, match=r"algorithm_state\['mine'\].* is \(.*\) \w+, and init makes \("):
            resumed(*REFUSED[name])

    @pytest.mark.parametrize("name", TAKEN)
    def test_taken(self, name: str) -> None:
        state = resumed(*TAKEN[name])
        assert state.timestamp.epoch == 3

    def test_init_draws_no_numbers_of_the_program(self) -> None:
        state = pl.run(fit(small(), algorithms=[])).remember("mine", torch.zeros(3))
        algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, init=lambda state: torch.randn(3))
        torch.manual_seed(5)
        fit(state, algorithms=[algorithm])
        drawn = torch.randn(3)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.randn(3))


SCALARS = {
    "skipped": (torch.zeros(1, dtype=torch.int64), torch.zeros(()), torch.zeros((), dtype=torch.int32)),
    "nonfinite": (torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.ones(())),
}


class TestScalars:
    """``skipped``, ``nonfinite`` and the loss scale are scalars of one dtype: others are refused on loading."""

    @pytest.mark.parametrize("name", SCALARS)
    def test_of_a_state(self, name: str, trained: pl.State, tmp_path: Path) -> None:
        for tensor in SCALARS[name]:
            pl.save(trained.replace(**{name: tensor}), tmp_path / "x.safetensors")
            with pytest.raises(CheckpointError, match=f"its {name} is .*, and a State has .. int64 there"):
                pl.load(tmp_path / "x.safetensors", model=small())
            assert pl.latest(tmp_path) is None

    def test_of_the_loss_scale(self, trained: pl.State, tmp_path: Path) -> None:
        right = pl.precision.LossScale.initial(torch.device("cpu"))
        for wrong in (
            pl.precision.LossScale(right.scale.expand(2), right.growth_tracker),
            pl.precision.LossScale(right.scale.double(), right.growth_tracker),
            pl.precision.LossScale(right.scale, right.growth_tracker.float()),
        ):
            pl.save(trained.replace(loss_scale=wrong), tmp_path / "x.safetensors")
            with pytest.raises(CheckpointError, match=r"its loss_scale\.\w+ is"):
                pl.load(tmp_path / "x.safetensors", model=small())
        pl.save(trained.replace(loss_scale=right), tmp_path / "x.safetensors")
        assert float(pl.load(tmp_path / "x.safetensors", model=small()).loss_scale) == 65536.0


class TestStrides:
    """Numbers that share a place in memory would be altered, and those that leave one empty are none of a writer.

    Tried besides: strides that a writer gives, of permuted dimensions, of size 1 and of none.
    """

    def changed(self, trained: pl.State, path: Path, shape: list[int], stride: list[int]) -> pl.State:
        pl.save(trained.remember("x", torch.arange(6.0)), path)
        content = path.read_bytes()
        name = document_of(content)["fields"]["algorithm_state"]["frozen"]["x"]["tensor"]
        value = json.dumps({"tensor": name, "shape": shape, "stride": stride})
        path.write_bytes(rewritten(content, ("fields", "algorithm_state", "frozen", "x"), value))
        return pl.load(path, model=small())

    @pytest.mark.parametrize(
        ("shape", "stride"),
        [
            *([[3, 2], [1, 1]], [[6], [0]], [[6], [2]], [[2, 3], [3, -1]], [[2, 3], [True, 2]]),
        ],
        ids=str,
    )
    def test_refused(self, trained: pl.State, tmp_path: Path, shape: list[int], stride: list[int]) -> None:
        with pytest.raises(CheckpointError):
            self.changed(trained, tmp_path / "x.safetensors", shape, stride)
        assert pl.latest(tmp_path) is None

    @pytest.mark.parametrize(
        ("shape", "stride"), [([3, 2], [1, 3]), ([1, 2, 3], [7, 1, 2]), ([2, 3], [3, 1]), ([6, 1], [1, 1])], ids=str
    )
    def test_taken(self, trained: pl.State, tmp_path: Path, shape: list[int], stride: list[int]) -> None:
        state = self.changed(trained, tmp_path / "x.safetensors", shape, stride)
        tensor: Tensor = state.algorithm_state["x"]
        assert (list(tensor.shape), list(tensor.stride())) == (shape, stride)
        assert torch.equal(tensor, torch.arange(6.0).view(shape))

    def test_parameters(self, trained: pl.State, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        pl.save(trained, path)
        content = path.read_bytes()
        value = '{"tensor": "params.0.weight", "shape": [3, 2], "stride": [1, 1]}'
        path.write_bytes(rewritten(content, ("fields", "params", "frozen", "0.weight"), value))
        for options in ({}, {"weights_only": True}):
            with pytest.raises(CheckpointError, match="overlap or have holes"):
                pl.load(path, model=small(), **options)

    def test_two_parameters_of_one_tensor(self, trained: pl.State, tmp_path: Path) -> None:
        """A file can say that two names have one tensor; where the model has two, they are two."""
        path = tmp_path / "x.safetensors"
        pl.save(trained, path)
        value = '{"tensor": "params.0.bias"}'
        path.write_bytes(rewritten(path.read_bytes(), ("fields", "params", "frozen", "1.bias"), value))
        for options in ({}, {"weights_only": True}):
            state = pl.load(path, model=small(), **options)
            assert torch.equal(state.params["0.bias"], state.params["1.bias"])
            assert state.params["0.bias"].data_ptr() != state.params["1.bias"].data_ptr()
        resumed = pl.run(fit(pl.load(path, model=small()), max_duration="3ep"))
        separate = trained.replace(params={**trained.params, "1.bias": trained.params["0.bias"].clone()})
        assert_same(resumed, pl.run(fit(separate, max_duration="3ep")), "two tensors")
