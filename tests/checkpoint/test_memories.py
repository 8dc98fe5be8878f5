"""What algorithms have remembered, of shapes and structures that it can't have: refused by leaf."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CheckpointError, ResumeError
from pure_loop.testing._compositions import ALGORITHMS, built
from tests.support.checkpoint_runs import DATA, fit, small, trained
from tests.support.hostile import at, described, document_of, places
from tests.support.problem import cross_entropy, mlp
from tests.support.streams import assert_same
from tests.support.tiers import examples

Z = torch.zeros


# Of fewer, more and exchanged dimensions, that broadcast and that don't; of other kinds of numbers and narrower ones.
AVERAGES: list[tuple[str, str, Any]] = [
    *(("buffers", "1.running_mean", Z(1)), ("params", "9.weight", Z(1)), ("params", "9.weight", None)),
    *(("params", "0.weight", Z(size)) for size in ((1,), (), (2, 5, 4), (1, 4), (4, 5))),
    *(("params", "0.weight", Z(5, 4, dtype=dtype)) for dtype in (torch.int32, torch.complex64, torch.float16)),
    *(("params", "0.weight", value) for value in (0.5, None, [Z(5, 4)], ...)),
]


def test_an_average_that_does_not_fit_its_parameter_is_refused(tmp_path: Path) -> None:
    """It would be broadcast, and train on: by each way to load it, and in evaluation and prediction."""
    path, memory = tmp_path / "x.safetensors", trained().algorithm_state["ema"]
    options: Any = {"algorithms": [pl.algorithms.ema(half_life="3ba")]}
    for kind, name, value in AVERAGES:
        values = {key: item for key, item in {**memory[kind], name: value}.items() if item is not ...}
        wrong = trained().remember("ema", {**memory, kind: values})
        pl.save(wrong, path)
        for attempt in (
            lambda wrong=wrong: fit(wrong, max_duration="3ep"),
            lambda: fit(load_path=path, max_duration="3ep"),
            lambda: fit(autoresume=tmp_path, max_duration="3ep"),
            lambda wrong=wrong: pl.evaluate(wrong, DATA[:1], loss=cross_entropy, **options),
            lambda wrong=wrong: pl.predict(wrong, DATA[:1], **options),
        ):
            with pytest.raises(ResumeError, match=rf"algorithm_state\['ema'\]\['{kind}'\]\['{name}'\] is"):
                attempt()
    with pytest.raises(ResumeError, match=r"average of params\['0.weight'\] has shape \(1,\), and the parameter"):
        pl.algorithms.averaged(trained().remember("ema", {**memory, "params": {**memory["params"], "0.weight": Z(1)}}))


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
    "a counter": (lambda s: Z((), dtype=torch.int64), Z(3, dtype=torch.int64)),
    "a counter of floats": (lambda s: Z((), dtype=torch.int64), Z(())),
    "a window": (lambda s: {"last": Z(5)}, {"last": Z(4)}),
    "a parameter's": (lambda s: {"0.weight": s.params["0.weight"]}, {"0.weight": 0}),
    "a history of pairs": (lambda s: Z(0, 2), Z(7, 3)),
    "a history of vectors": (lambda s: Z(0), Z(7, 3)),
}
TAKEN: dict[str, tuple[Callable[[pl.State], Any], Any]] = {
    "what grows": (lambda s: [Z(0, 2), [], Z((), dtype=torch.int32)], [Z(7, 2), [Z(2)], Z((), dtype=torch.int64)]),
    "what is filled": (lambda s: [{}, None], [{"0.weight": Z(1), "any": 3}, {"x": Z(9)}]),
    "others, and fewer": (lambda s: [0, Z(()), {}, {"last": 0}, ()], [Z(3), None, (0,), {}]),
    "an init that reads numbers": (lambda s: Z(int(s.params["0.weight"].sum() * 0) + 3), Z(4)),
    "an init for another State": (lambda s: 1 / 0, Z(4)),
    "layers as they thaw": (lambda s: {"0.weight": Z(3, 2)}, {"0.weight": Z(3, 2), "0.bias": Z(3, 2)}),
}


def test_what_may_differ_from_what_init_makes_and_what_may_not() -> None:
    for name, (init, memory) in REFUSED.items():
        with pytest.raises(ResumeError, match=r"algorithm_state\['mine'\].* is (int|\(.*\) \w+), and init makes \("):
            pytest.fail(f"{name}: {resume(init, memory)}")
    for name, (init, memory) in TAKEN.items():
        assert resume(init, memory).timestamp.batch == 9, name


LISTED = ("early_stopping", "ema", "layer_freezing", "lookahead", "reduce_on_plateau", "swa", "threshold_stopping")
ADAPTIVE = [pl.algorithms.sam(interval=5, reuse=0.7), pl.algorithms.gradient_clipping("quantile", 0.1)]


@examples(60, 3000)
@given(data=st.data(), algorithm=st.one_of(*(built(ALGORITHMS[name]) for name in LISTED), st.sampled_from(ADAPTIVE)))
def test_a_memory_of_another_structure_is_refused_or_does_no_harm(data: st.DataObject, algorithm: pl.Algorithm) -> None:
    build, batches = data.draw(st.sampled_from([small, mlp])), data.draw(st.integers(1, 7))
    with tempfile.TemporaryDirectory() as folder:
        path, refused = Path(folder, "x.safetensors"), folder
        assume("tok" not in repr(algorithm))  # the data has none
        pl.save(pl.run(fit(build(), algorithms=[algorithm], max_duration=f"{batches}ba")), path)
        document = document_of(path.read_bytes())
        memories = document["fields"]["algorithm_state"]
        (*before, key), value = data.draw(st.sampled_from([*places(memories)]))
        others = ["x", None, {"frozen": {}}, [], *[5] * (not isinstance(value, int | float))]
        at(memories, before)[data.draw(st.sampled_from([key, "9.weight"]))] = data.draw(st.sampled_from(others))
        if data.draw(st.booleans()):
            del at(memories, before)[key]
        path.write_bytes(described(path.read_bytes(), json.dumps(document)))
        try:
            pl.run(fit(build(), algorithms=[algorithm], load_path=path))
        except (CheckpointError, ResumeError) as error:
            refused = str(error)
        assert folder in refused


def test_what_the_library_remembers_is_compared_as_a_whole() -> None:
    memory, algorithms = trained().algorithm_state["ema"], [pl.algorithms.ema(half_life="3ba", offload=True)]
    fit(trained().remember("ema", {**memory, "buffers": {}}), max_duration="3ep", algorithms=algorithms)
    for wrong in ([], 0, *({**memory, key: value} for key in ("buffers", "updated", "params") for value in ([], 0))):
        with pytest.raises(ResumeError, match=r"algorithm_state\['ema'\].* is (list|int), and init makes FrozenDict"):
            fit(trained().remember("ema", wrong), max_duration="3ep", algorithms=algorithms)


def test_an_average_goes_on_with_a_warm_up_that_began_without() -> None:
    state = pl.run(fit(trained(), max_duration="3ep", algorithms=[pl.algorithms.ema(half_life="3ba", warmup=True)]))
    assert state.algorithm_state["ema"]["updates"] == 4


def test_init_draws_no_numbers_of_the_program() -> None:
    state = trained().remember("mine", Z(3))
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, init=lambda state: torch.randn(3))
    before = torch.get_rng_state()
    fit(state, algorithms=[algorithm], max_duration="3ep")
    assert torch.equal(torch.get_rng_state(), before)
