"""Tensors of a model that share memory: refused by name where a State would separate them, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl

DATA = [(torch.randn(4, 4), torch.randn(4, 4))] * 3


class Holds(nn.Module):
    """Two linear layers, and whatever else ``fill`` registers."""

    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def data_of_another(m: Any) -> None:
    m.b.weight.data = m.a.weight.data


def parameter_of_a_parameter(m: Any) -> None:
    m.b.weight = nn.Parameter(m.a.weight)


def view_of_a_buffer(m: Any) -> None:
    m.register_buffer("base", torch.zeros(4))
    m.register_buffer("head", m.base[:2])


def view_of_a_parameter(m: Any) -> None:
    m.register_buffer("row", m.a.weight.data[0])


def the_parameter_as_a_buffer(m: Any) -> None:
    m.register_buffer("again", m.a.weight)


def partial_overlap(m: Any) -> None:
    flat = torch.zeros(6)
    m.register_buffer("first", flat[:4])
    m.register_buffer("second", flat[2:])


def crossing_columns(m: Any) -> None:
    matrix = torch.zeros(4, 6)
    m.register_buffer("first", matrix[:, :3])
    m.register_buffer("second", matrix[:, 2:])


def other_dtype(m: Any) -> None:
    m.register_buffer("bits", torch.zeros(4, dtype=torch.int32))
    m.register_buffer("numbers", m.bits.view(torch.float32)[1:])


def expanded_from_another(m: Any) -> None:
    m.register_buffer("one", torch.zeros(1))
    m.register_buffer("four", m.one.expand(4).as_strided((1,), (1,)))


def array_of_another(m: Any) -> None:
    """Two storages of torch's over one memory."""
    array = np.zeros(4, dtype=np.float32)
    m.register_buffer("first", torch.from_numpy(array))
    m.register_buffer("second", torch.from_numpy(array[1:]))


def view_in_an_attribute(m: Any) -> None:
    m.register_buffer("base", torch.zeros(4))
    m.heads = {"head": m.base[:2]}


REFUSED = {
    data_of_another: ("'a.weight'", "'b.weight'"),
    parameter_of_a_parameter: ("'a.weight'", "'b.weight'"),
    view_of_a_buffer: ("'base'", "'head'"),
    view_of_a_parameter: ("'a.weight'", "'row'"),
    the_parameter_as_a_buffer: ("'a.weight'", "'again'"),
    partial_overlap: ("'first'", "'second'"),
    crossing_columns: ("'first'", "'second'"),
    other_dtype: ("'bits'", "'numbers'"),
    expanded_from_another: ("'one'", "'four'"),
    array_of_another: ("'first'", "'second'"),
    view_in_an_attribute: ("'base'", "'heads'"),
}


def fit(model: nn.Module) -> pl.State:
    stream = pl.fit(model, DATA, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    return pl.run(stream)


@pytest.mark.parametrize("fill", REFUSED, ids=lambda fill: fill.__name__)
def test_tensors_that_share_memory_are_refused_by_name(fill: Callable[[Any], None]) -> None:
    """By hand a write to one shows in the other; also for a State made by hand and for surgery."""
    model = Holds(fill)
    for call in (
        lambda: pl.fit(model, DATA, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"),
        lambda: pl.State.create(model),
        lambda: pl.State.create(nn.Linear(1, 1)).with_module(model),
    ):
        with pytest.raises(pl.ModelError, match="share memory") as caught:
            call()
        assert all(name in str(caught.value) for name in REFUSED[fill])
        assert "assign the object itself" in str(caught.value)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_that_overlaps_with_itself_is_refused(kind: str) -> None:
    """Expanded tensors: ``m.four[0] = 1`` writes to all elements by hand."""

    def fill(m: Any) -> None:
        expanded = torch.zeros(1).expand(4)
        if kind == "buffer":
            m.register_buffer("four", expanded)
        else:
            m.four = nn.Parameter(expanded)

    with pytest.raises(pl.ModelError, match=rf"{kind} 'four' of shape \(4,\) has strides \(0,\).*clone"):
        fit(Holds(fill))


def tied(m: Any) -> None:
    m.b.weight = m.a.weight


def tied_buffers(m: Any) -> None:
    m.register_buffer("first", torch.zeros(3))
    m.register_buffer("second", m.first)


def slices_of_one_storage(m: Any) -> None:
    flat = torch.arange(40, dtype=torch.float32) / 100
    m.a.weight.data, m.b.weight.data = flat[:16].view(4, 4), flat[16:32].view(4, 4)
    m.a.bias.data, m.b.bias.data = flat[32:36], flat[36:]


def columns_of_one_matrix(m: Any) -> None:
    matrix = torch.randn(4, 8)
    m.a.weight.data, m.b.weight.data = matrix[:, ::2], matrix[:, 1::2]


def nothing_of_one_storage(m: Any) -> None:
    m.register_buffer("empty", m.a.weight.data[:0])
    m.register_buffer("empty_too", m.a.weight.data[:0])


def plain_views(m: Any) -> None:
    m.table = torch.zeros(4)
    m.part = m.table[:2]


def a_dimension_of_one(m: Any) -> None:
    m.register_buffer("positions", torch.arange(4).expand((1, -1)))


def turned(m: Any) -> None:
    m.a.weight.data = torch.randn(4, 4).t()
    m.register_buffer("last", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))


def a_lattice(m: Any) -> None:
    """Strides that no simple rule passes, and nine different places: 0 2 4 3 5 7 6 8 10."""
    m.register_buffer("lattice", torch.arange(12).as_strided((3, 3), (2, 3)))


ACCEPTED = [
    *(tied, tied_buffers, slices_of_one_storage, columns_of_one_matrix, nothing_of_one_storage, plain_views),
    *(a_dimension_of_one, turned, a_lattice),
]


@pytest.mark.parametrize("fill", ACCEPTED, ids=lambda fill: fill.__name__)
def test_one_storage_without_an_overlap_trains(fill: Callable[[Any], None]) -> None:
    """Against the loop by hand: ties, flat storage, columns, empty tensors, views among plain attributes."""
    torch.manual_seed(0)
    expected, model = Holds(fill), None
    torch.manual_seed(0)
    model = Holds(fill)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in DATA:
        optimizer.zero_grad()
        functional.mse_loss(expected(x), y).backward()
        optimizer.step()
    state = fit(model)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(state.params[name], parameter.detach())
    for name, buffer in expected.named_buffers():
        assert torch.equal(state.buffers[name], buffer)


def test_recurrent_layers_and_memory_on_no_device_pass() -> None:
    """RNNs list their weights in an attribute; a table on the meta device has no memory to share."""
    model = nn.LSTM(4, 4)
    model.register_buffer("nothing", torch.empty(3, device="meta"))
    assert len(pl.State.create(model).params) == 4
