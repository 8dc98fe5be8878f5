"""The table of layers: its numbers are those of a real forward, and of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pure_loop as pl
from pure_loop.entry.layers import Layer, LayerTable, layer_table
from tests.support.problem import MODELS, cross_entropy, mlp, points
from tests.support.tiers import examples


@examples(12, 100)
@given(st.sampled_from(["mlp", "noisy", "convnet"]), st.integers(0, 3), st.integers(2, 3))
def test_its_numbers_are_those_of_a_real_forward(name: str, depth: int, size: int) -> None:
    """Of nested layers, one of which is frozen in part."""
    make, data = MODELS[name]
    model, inputs = nn.Sequential(nn.Sequential(make())), data(1, size)[0][0]
    next(model.parameters()).requires_grad_(requires_grad=False)
    before = torch.get_rng_state()
    shown = layer_table(pl.State.create(model), pl.Task(), (inputs, None), depth=depth)
    assert torch.equal(torch.get_rng_state(), before)
    modules = {path: each for path, each in model.named_modules() if path == "" or path.count(".") < depth}
    assert [layer.path for layer in shown.layers] == list(modules)
    outputs: dict[str, Any] = {}
    for path, module in modules.items():
        module.register_forward_hook(lambda module, args, output, path=path: outputs.setdefault(path, output))
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    assert shown.layers[0].flops == counter.get_total_flops()
    for layer in shown.layers:
        parameters = list(modules[layer.path].parameters())
        assert layer.kind == type(modules[layer.path]).__name__
        assert layer.output == (tuple(outputs[layer.path].shape),)
        assert layer.parameters == sum(parameter.numel() for parameter in parameters)
        assert layer.frozen == sum(p.numel() for p in parameters if not p.requires_grad)


class Reading(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) if inputs.sum() >= 0 else inputs


def test_the_text_is_a_table() -> None:
    """A forward that reads numbers leaves parameters and a sentence."""
    net = Layer("", "Net", ((4, 2), (), (1,), (2,)), 1_234_567, 12, 5_000_000)
    assert repr(LayerTable((net, Layer("a", "Linear", None, 0, 0, None)))).splitlines() == [
        "layer  class   output           parameters  frozen  FLOPs",
        "model  Net     4x2, (), 1, ...   1,234,567      12    5 M",
        "  a    Linear  -                         -       -      -",
    ]
    read = layer_table(pl.State.create(Reading(3, 2)), pl.Task(), (torch.ones(4, 3), None))
    assert read.layers == (Layer("", "Reading", None, 8, 0, None),)
    assert "a forward on the meta device failed (RuntimeError: Tensor.item()" in repr(read).replace("\n", " ")
    assert "Tensor.item()" in read._repr_html_()


def test_explain_has_a_table_of_what_it_can_know(capsys: pytest.CaptureFixture[str]) -> None:
    loader = iter(points(1))
    for data, options, says in (
        (points(1), {}, "    0    Linear      4x8             40       -    256\n"),
        (loader, {}, "sample=batch"),
        (loader, {"sample": points(1)[0]}, "    0    Linear      4x8 "),
    ):
        pl.explain(mlp(), data, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", **options)
        assert says in capsys.readouterr().out
    assert next(loader)[0].shape == (4, 4)
