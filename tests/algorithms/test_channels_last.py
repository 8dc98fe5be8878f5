"""Channels last: strides of weights, images, optimizer state and files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import channels_last
from pure_loop.algorithms.channels_last import in_channels_last
from tests.support.runs import close, convnet, images, stream, train


def test_strides() -> None:
    assert in_channels_last(torch.zeros(8, 3, 3, 3)).stride() == (27, 1, 9, 3)
    assert in_channels_last(torch.zeros(2, 3, 4, 5, 6)).is_contiguous(memory_format=torch.channels_last_3d)
    line = torch.zeros(8, 3, 3)
    assert in_channels_last(line) is line


def test_all_of_training_is_in_channels_last(tmp_path: Path) -> None:
    options = {"optimizer": pl.optim.sgd(lr=0.01, momentum=0.9)}
    model = convnet()
    model[5] = nn.Identity()  # dropout draws in the order of memory
    pairs = list(stream(model, images(), [channels_last()], **options))
    for event, state in pairs:
        if event is Event.BEFORE_FORWARD:
            assert state.microbatch[0].is_contiguous(memory_format=torch.channels_last)
    last = pairs[-1][1]
    pl.save(last, tmp_path / "x.safetensors")
    loaded = pl.load(tmp_path / "x.safetensors", model=last.module())
    for state in (last, loaded):
        for tensor in (state.params["4.weight"], state.opt_state["momentum_buffer"]["4.weight"]):
            assert tensor.stride() == (144, 1, 48, 16)
    close(last.params, train(model, images(), **options).params)
