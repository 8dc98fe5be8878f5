"""``precision="amp_fp8"``: its layers are in the structure, with the names and numbers of the model; emulated here."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.entry.float8 import refuse_float8
from pure_loop.errors import ArgumentError, MissingExtraError, ModelError
from pure_loop.precision import Precision
from pure_loop.random import seeded
from tests.support import problem
from tests.support.streams import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchao, in its own code
    pytest.importorskip("torchao.float8", reason="the extra fp8 is not installed")

EMULATED: Any = attrs.evolve(Precision.parse("amp_fp8"), emulate=True)
CONVERTED = ["Float8Linear", "LayerNorm", "ReLU", "Float8Linear", "Linear"]
BATCHES = [
    (torch.randn(8, 16, generator=g), torch.randn(8, 3, generator=g)) for g in [problem.noise()] for _ in "12345"
]


def model() -> Any:
    with seeded(3):
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 3))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


def fit(start: Any, precision: Any = EMULATED, **options: Any) -> Any:
    settings = {"loss": loss, "optimizer": pl.optim.adamw(0.01), "max_duration": "1ep", "strict": None, **options}
    return problem.fit(start, BATCHES, **settings, precision=precision)


def classes(state: pl.State) -> list[str]:
    return [type(layer).__name__ for layer in state.module()]  # type: ignore[arg-type]


def test_training_is_that_of_the_converted_module() -> None:
    """By hand: torchao's own conversion, autocast, and the optimizer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    hand, module = model(), model()
    config = Float8LinearConfig(pad_inner_dim=True, emulate=True)
    convert_to_float8_training(hand, config=config, module_filter_fn=lambda layer, name: layer.out_features % 16 == 0)
    optimizer = torch.optim.AdamW(hand.parameters(), lr=0.01, fused=True)
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hand(inputs), targets)
        value.backward()
        optimizer.step()
    state = pl.run(fit(module))
    assert classes(state) == CONVERTED
    assert type(module[0]) is nn.Linear  # which stays as it was
    assert_same(dict(state.params), {name: each.detach() for name, each in hand.named_parameters()}, "by hand")
    assert not torch.equal(pl.run(fit(model(), "amp_bf16")).params["0.weight"], state.params["0.weight"])


def test_it_resumes_and_a_checkpoint_is_of_the_plain_model(tmp_path: Path) -> None:
    kept = [state for event, state in fit(model()) if event is Event.BATCH_END]
    path = tmp_path / "x.safetensors"
    pl.save(kept[1], path)
    loaded = pl.load(path, model=model())
    assert classes(loaded) == [type(layer).__name__ for layer in model()]
    for stream in (fit(kept[0]), fit(loaded), fit(model(), load_path=path)):
        resumed = pl.run(stream)
        assert_same(dict(resumed.params), dict(kept[-1].params), "resumed")
        assert classes(resumed) == CONVERTED
    pl.run(fit(loaded, "amp_bf16"))  # the same numbers in another precision


def test_evaluation_and_prediction_have_its_precision() -> None:
    state, plain = pl.run(fit(model(), evaluators=BATCHES)), model()
    plain.load_state_dict(state.module().state_dict())
    for start in (state, plain):
        results = pl.run(pl.evaluate(start, BATCHES, loss=loss, precision=EMULATED)).metrics
        assert results["eval"]["loss"] == state.metrics["eval"]["loss"]
    outputs = [s.outputs for e, s in pl.predict(plain, BATCHES, precision=EMULATED) if e is Event.PREDICT_BATCH_END]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(outputs[0], state.module(training=False)(BATCHES[0][0]))


def test_surgery_comes_first_and_shared_layers_and_hooks_stay() -> None:
    calls: list[int] = []

    @pl.algorithm(Event.INIT)
    def widen(state: pl.State) -> pl.State:
        module: Any = state.module()
        module[3], module[4] = nn.Linear(32, 32), nn.Linear(32, 3)
        module.insert(4, module[3])
        module[3].register_forward_hook(lambda layer, inputs, output: calls.append(1))
        return state.with_module(module)

    state = pl.run(fit(model(), algorithms=[widen]))
    trained: Any = state.module()
    assert classes(state) == [*CONVERTED[:4], *CONVERTED[3:]]
    assert trained[3] is trained[4]
    assert len(calls) == 2 * len(BATCHES)


def test_what_cannot_be_converted_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"finds no layer in Sequential to convert: .*multiples of 16"):
        fit(nn.Sequential(nn.Linear(16, 3)))
    for call in (lambda: fit(model(), "amp_fp8"), lambda: pl.predict(model(), BATCHES, precision="amp_fp8")):
        with pytest.raises(ArgumentError, match=r"needs a GPU that multiplies in float8 .*this device is cpu"):
            call()
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"amp_fp8.*pip install 'pure_loop\[fp8\]'"):
        refuse_float8(EMULATED, torch.device("cpu"))
