"""Recurrent layers in a graph: as they are trained, and of long sequences a few steps at a time.

What torch (2.11 to 2.13) takes them apart into has no dropout between the layers; and an LSTM of float32 on a CPU
becomes a kernel for inference, which keeps nothing for a backward, wherever its *input* needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch._decomp.decompositions
from torch import Tensor

from pure_loop._autograd import GradMode
from pure_loop.compile.repeated import Maker

__all__ = ["recurrent_layers"]

_torchs: Any = torch._decomp.decompositions

# Up to so many steps are written out: the compiler fuses them, and takes seconds for each.
WRITTEN_OUT = 12
# How many are compiled as one, otherwise.
AT_ONCE = range(6, 13)


@contextmanager
def recurrent_layers(make: Maker) -> Iterator[None]:
    """Inside, recurrent layers are traced so; ``make`` compiles their steps."""
    stacked, select = _torchs._rnn_helper, _torchs.select_one_layer_lstm_function

    def with_dropout(
        sequence: Tensor,
        hidden: Any,
        parameters: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        one_layer: Any,
    ) -> Any:
        directions, last = 1 + bidirectional, []
        hidden, parameters = list(hidden), list(parameters)
        in_steps = partial(_in_steps, make, one_layer)
        if batch_first:
            sequence = sequence.transpose(0, 1)
        for layer in range(num_layers):
            mine = slice(layer * directions, (layer + 1) * directions)
            sequence, ends = stacked(
                *(sequence, hidden[mine], parameters[mine], has_biases, 1, 0.0, train, bidirectional, False, in_steps)
            )
            last += ends
            if train and dropout and layer < num_layers - 1:
                sequence = torch.dropout(sequence, dropout, train)
        return sequence.transpose(0, 1) if batch_first else sequence, last

    def with_gradients(sequence: Tensor, hidden: Any, parameters: Any) -> Any:
        if torch.is_grad_enabled() and any(each.requires_grad for each in chain(hidden, *parameters)):
            return _torchs.one_layer_lstm
        return select(sequence, hidden, parameters)

    _torchs._rnn_helper, _torchs.select_one_layer_lstm_function = with_dropout, with_gradients
    try:
        yield
    finally:
        _torchs._rnn_helper, _torchs.select_one_layer_lstm_function = stacked, select


def _in_steps(
    make: Maker,
    one_layer: Callable[..., Any],
    sequence: Tensor,
    hidden: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    """One direction of one layer over a sequence of shape (steps, batch, features)."""
    steps = len(sequence)
    is_kernel = one_layer is _torchs.mkldnn_one_layer_lstm
    if steps <= WRITTEN_OUT or is_kernel or torch._C._functorch.peek_interpreter_stack() is not None:
        return one_layer(sequence, hidden, params, has_biases, reverse=reverse)  # type: ignore[no-any-return]
    if one_layer is _torchs.one_layer_lstm and _has_kernel(sequence, *hidden, *params):
        return _by_kernel(make, sequence, hidden, params, has_biases, reverse)
    several = isinstance(hidden, tuple)
    count = len(hidden) if several else 1

    def some(part: Tensor, *given: Tensor) -> list[Tensor]:
        before = tuple(given[:count]) if several else given[0]
        found, after = one_layer(part, before, list(given[count:]), has_biases, reverse=reverse)
        return [found, *(after if several else (after,))]

    at_once = min(AT_ONCE, key=lambda size: (size + steps % size, -size))  # what remains is written out
    whole, rest = steps // at_once, steps % at_once
    sizes = [at_once] * whole + [rest] * bool(rest)
    parts: Any = torch.split(sequence, sizes[::-1] if reverse else sizes)
    key = (*_kind(one_layer), has_biases, reverse)
    now, found = list(hidden) if several else [hidden], []
    if torch.is_grad_enabled() and any(each.requires_grad for each in (sequence, *params)):
        # The first steps are compiled as those after them, whose hidden state has a gradient.
        now = [each if each.requires_grad else each.detach().requires_grad_() for each in now]
    for part in reversed(parts) if reverse else parts:
        given = [part, *now, *params]
        call = some if len(part) < at_once else make.traced(key, some, given)
        out, *now = call(*given)
        found.append(out)
    if reverse:
        found.reverse()
    return torch.cat(found), tuple(now) if several else now[0]


def _has_kernel(*given: Tensor) -> bool:
    """Whether torch has an LSTM over these as one kernel, with its backward."""
    return (
        torch._C._get_mkldnn_enabled()
        and all(each.is_cpu and each.dtype is torch.float32 for each in given)
        and not torch.is_autocast_enabled("cpu")
        and len(given) in (5, 7)  # a projection has one more
    )


_LSTM = 2


def _by_kernel(
    make: Maker,
    sequence: Tensor,
    hidden: tuple[Tensor, Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    size, of_each, count = hidden[0].shape[-1], (1, has_biases), len(params)
    biases = [] if has_biases else [torch.zeros_like(params[0][:, 0])] * 2

    def forward(given: list[Tensor]) -> Sequence[Tensor]:
        options: Any = (reverse, [], _LSTM, size, *of_each, False, False, True)
        with GradMode(True):  # else it keeps nothing for the backward
            return torch.ops.aten.mkldnn_rnn_layer(*[each.detach() for each in given], *options)  # type: ignore[no-any-return]

    def backward(given: list[Tensor]) -> Sequence[Tensor]:
        options: Any = (reverse, _LSTM, size, *of_each, True, False, [], False)
        *before, workspace, by_out, by_h, by_c = given
        return torch.ops.aten.mkldnn_rnn_layer_backward(*before, by_out, by_h, by_c, *options, workspace)  # type: ignore[no-any-return]

    def written_out(sequence: Tensor, *given: Tensor) -> Sequence[Tensor]:
        *weights, h, c = given
        out, ends = _torchs.one_layer_lstm(sequence, (h, c), weights[:count], has_biases, reverse=reverse)
        return out, *ends

    given = [sequence, *params, *biases, *hidden]
    out, h, c = make.kernel((has_biases, reverse), forward, backward, written_out, given, 3)(*given)
    return out, (h, c)


def _kind(one_layer: Any) -> tuple[Any, ...]:
    """What tells the steps of layers apart."""
    step = one_layer.keywords["hidden_fn"] if isinstance(one_layer, partial) else one_layer
    return step.__qualname__, *[cell.cell_contents for cell in step.__closure__ or ()]
