"""What algorithms have remembered, of shapes that it can't have: refused by leaf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ResumeError
from tests.support.checkpoint_runs import DATA, fit, small, trained
from tests.support.problem import cross_entropy
from tests.support.streams import assert_same

Z = torch.zeros
INTEGERS = torch.int64


def average(name: str, tensor: Any, kind: str = "params") -> pl.State:
    """A State with this in the place of an average; ``...``: nothing."""
    memory: Any = trained().algorithm_state["ema"]
    values = {**memory[kind], name: tensor}
    if tensor is ...:
        del values[name]
    return trained().remember("ema", {**memory, kind: values})


# Of fewer, more and exchanged dimensions, that broadcast and that don't; of other kinds of numbers and narrower ones.
AVERAGES: dict[str, Any] = {
    "one number": Z(1),
    "a scalar": Z(()),
    "a dimension more": Z(2, 5, 4),
    "a dimension of 1": Z(1, 4),
    "transposed": Z(4, 5),
    "integers": Z(5, 4, dtype=torch.int32),
    "complex": Z(5, 4, dtype=torch.complex64),
    "half": Z(5, 4, dtype=torch.float16),
    "a number": 0.5,
    "none": None,
    "a list": [Z(5, 4)],
    "missing": ...,
}


@pytest.mark.parametrize("name", [*AVERAGES, "of a buffer", "of nothing"])
def test_an_average_that_does_not_fit_its_parameter_is_refused(name: str, tmp_path: Path) -> None:
    """It would be broadcast, and train on: by each way to load it, and in evaluation and prediction."""
    others = {"of a buffer": ("1.running_mean", Z(1), "buffers"), "of nothing": ("9.weight", Z(1))}
    wrong, path = average(*others.get(name, ("0.weight", AVERAGES.get(name)))), tmp_path / "x.safetensors"
    pl.save(wrong, path)
    options: Any = {"algorithms": [pl.algorithms.ema(half_life="3ba")]}
    for attempt in (
        lambda: fit(wrong, max_duration="3ep"),
        lambda: fit(load_path=path, max_duration="3ep"),
        lambda: fit(autoresume=tmp_path, max_duration="3ep"),
        lambda: pl.evaluate(wrong, DATA[:1], loss=cross_entropy, **options),
        lambda: pl.predict(wrong, DATA[:1], **options),
    ):
        with pytest.raises(ResumeError, match=r"algorithm_state\['ema'\]\['(params|buffers)'\]\['\w\.\w+'\] is"):
            attempt()
    if name == "one number":
        with pytest.raises(ResumeError, match=r"average of params\['0.weight'\] has shape \(1,\), and the parameter"):
            pl.algorithms.averaged(wrong)


def test_of_half_precision_an_average_is_kept_in_float32(tmp_path: Path) -> None:
    data = [(inputs.bfloat16(), targets) for inputs, targets in DATA]
    options: dict[str, Any] = {"data": data, "evaluators": {}}
    state, path = pl.run(fit(small().bfloat16(), max_duration="1ep", **options)), tmp_path / "x.safetensors"
    assert state.algorithm_state["ema"]["params"]["0.weight"].dtype is torch.float32
    pl.save(state, path)
    wanted = pl.run(fit(small().bfloat16(), **options))
    assert_same(pl.run(fit(small().bfloat16(), load_path=path, **options)), wanted, "resumed")


def resume(init: Callable[[pl.State], Any], memory: Any) -> pl.State:
    """What training does with a State that has this memory, of an algorithm with this ``init``."""
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, init=init)
    state = trained().replace(algorithm_state={}).remember("mine", memory)
    return pl.run(fit(state, algorithms=[algorithm], max_duration="9ba"))


# What init makes, and what was remembered.
REFUSED: dict[str, tuple[Callable[[pl.State], Any], Any]] = {
    "a list of momenta": (lambda s: [torch.zeros_like(p) for p in s.params.values()], [Z(1)] * 6),
    "a counter": (lambda s: Z((), dtype=INTEGERS), Z(3, dtype=INTEGERS)),
    "a counter of floats": (lambda s: Z((), dtype=INTEGERS), Z(())),
    "a window": (lambda s: {"last": Z(5)}, {"last": Z(4)}),
    "a history of pairs": (lambda s: Z(0, 2), Z(7, 3)),
    "a history of vectors": (lambda s: Z(0), Z(7, 3)),
}
TAKEN: dict[str, tuple[Callable[[pl.State], Any], Any]] = {
    "a history": (lambda s: Z(0, 2), Z(7, 2)),
    "a list that grows": (lambda s: [], [Z(2), Z(3)]),
    "a dict that is filled": (lambda s: {}, {"0.weight": Z(1), "any": 3}),
    "a number that became a tensor": (lambda s: 0, Z(3)),
    "a number": (lambda s: 0, 7.5),
    "nothing at first": (lambda s: None, {"x": Z(9)}),
    "a wider counter": (lambda s: Z((), dtype=torch.int32), Z((), dtype=INTEGERS)),
    "an init that reads numbers": (lambda s: Z(int(s.params["0.weight"].sum() * 0) + 3), Z(4)),
    "an init for another State": (lambda s: 1 / 0, Z(4)),
    "layers as they thaw": (lambda s: {"0.weight": Z(3, 2)}, {"0.weight": Z(3, 2), "0.bias": Z(3, 2)}),
}


def test_what_may_differ_from_what_init_makes_and_what_may_not() -> None:
    for name, (init, memory) in REFUSED.items():
        with pytest.raises(ResumeError, match=r"algorithm_state\['mine'\].* is \(.*\) \w+, and init makes \("):
            pytest.fail(f"{name}: {resume(init, memory)}")
    for name, (init, memory) in TAKEN.items():
        assert resume(init, memory).timestamp.batch == 9, name


def test_init_draws_no_numbers_of_the_program() -> None:
    state = trained().remember("mine", Z(3))
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, init=lambda state: torch.randn(3))
    before = torch.get_rng_state()
    fit(state, algorithms=[algorithm], max_duration="3ep")
    assert torch.equal(torch.get_rng_state(), before)
