"""The layers of a model as a table: outputs, parameters and operations, from a forward on the meta device."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.pytree import Batch
from pure_loop._internal.reprs import columns, table
from pure_loop.data.batch import map_tensors
from pure_loop.random.seeds import seeded_all
from pure_loop.state import State
from pure_loop.task import Task

# Of each module, by its path: the shapes of its outputs, and its operations.
Calls: TypeAlias = dict[str, tuple[tuple[tuple[int, ...], ...], int]]

_HEAD = ("layer", "class", "output", "parameters", "frozen", "FLOPs")
_SHOWN = 3  # tensors of an output
_WIDTH = 96


@attrs.frozen
class Layer:
    """One module of a model.

    Attributes:
        path: its name in the model, ``"encoder.0"``; "" for the model itself.
        kind: its class.
        output: the shapes of the tensors that its first call returned; None: it was not called, or not known.
        parameters, frozen: the numbers in its parameters and those of its submodules, and how many are not trained.
        flops: floating-point operations of its calls, those of its submodules included; None: not known.
    """

    path: str
    kind: str
    output: tuple[tuple[int, ...], ...] | None
    parameters: int
    frozen: int
    flops: int | None

    @property
    def depth(self) -> int:
        """How deep it is in the model, which has depth 0."""
        return self.path.count(".") + 1 if self.path else 0


@attrs.frozen(repr=False)
class LayerTable:
    """The modules of a model, in the order in which they are registered; a notebook or a terminal shows a table.

    Attributes:
        layers: the modules down to the depth that was passed, the model itself first: its numbers are the totals.
        why_not: why outputs and operations are not known; "" where they are.
    """

    layers: tuple[Layer, ...]
    why_not: str = ""

    def _rows(self) -> list[tuple[str, ...]]:
        has_outputs = not self.why_not
        rows = []
        for layer in self.layers:
            name = "  " * layer.depth + (layer.path.rpartition(".")[2] if layer.path else "model")
            output = "-" if layer.output is None else ", ".join(map(_shape, layer.output[:_SHOWN])) or "no tensor"
            more = ", ..." if layer.output is not None and len(layer.output) > _SHOWN else ""
            counts = (
                f"{layer.parameters:,}" if layer.parameters else "-",
                f"{layer.frozen:,}" if layer.frozen else "-",
            )
            flops = (in_flops(layer.flops) if layer.flops else "-",) if has_outputs else ()
            rows.append((name, layer.kind, *((output + more,) if has_outputs else ()), *counts, *flops))
        return rows

    @property
    def _head(self) -> tuple[str, ...]:
        return tuple(name for name in _HEAD if not self.why_not or name not in ("output", "FLOPs"))

    def __repr__(self) -> str:
        lines = columns([self._head, *self._rows()], left=range(2 if self.why_not else 3))
        return "\n".join([*lines, textwrap.fill(self.why_not, _WIDTH)] if self.why_not else lines)

    def _repr_html_(self) -> str:
        html = table([tuple(cell.replace("  ", "\u2003") for cell in row) for row in self._rows()], self._head)
        return html + table([(self.why_not,)]) if self.why_not else html


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"


def in_flops(count: int) -> str:
    """A number of operations in three digits.

    >>> in_flops(512), in_flops(5_430_000)
    ('512', '5.43 M')
    """
    size, unit = float(count), ""
    for unit in ("", " k", " M", " G", " T", " P"):
        if size < 1000 or unit == " P":
            break
        size /= 1000
    return f"{size:.3g}{unit}"


def layer_table(state: State, task: Task, batch: Batch, depth: int = 2) -> LayerTable:
    """The layers of a State's model, of which a copy without numbers runs one forward on the meta device.

    Args:
        state: with the model.
        task: its ``forward`` is called.
        batch: what it is called with; its tensors are not read. None: there is none, and nothing is run.
        depth: how deep modules inside modules are listed.

    >>> import torch
    >>> state = State.create(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> layer_table(state, Task(), (torch.zeros(4, 3), torch.zeros(4)))
    layer  class       output  parameters  frozen  FLOPs
    model  Sequential  4x2             50       -    320
      0    Linear      4x8             32       -    192
      1    ReLU        4x8              -       -      -
      2    Linear      4x2             18       -    128
    """
    calls: Calls = {}
    why_not = "Outputs and FLOPs are not known: pass a batch, sample=batch."
    if batch is not None:
        why_not = _run(state.model.copied(independent=True), task, batch, calls)
    trained = frozenset(state.model.trainable)
    layers = []
    for path, module in state.model.skeleton.named_modules():
        call = calls.get(path)
        prefix = f"{path}." if path else ""
        sizes = {name: p.numel() for name, p in state.params.items() if name in _names(module, prefix, state.params)}
        layer = Layer(
            path,
            type(module).__name__,
            None if call is None else call[0],
            sum(sizes.values()),
            sum(size for name, size in sizes.items() if name not in trained),
            None if call is None else call[1],
        )
        if layer.depth <= depth:
            layers.append(layer)
    return LayerTable(tuple(layers), why_not)


def _names(module: nn.Module, prefix: str, params: Mapping[str, Tensor]) -> set[str]:
    """The names of a module's parameters in the model; those of a tied one is that of its first place."""
    return {prefix + name for name, _ in module.named_parameters(remove_duplicate=False)} & params.keys()


def _run(module: nn.Module, task: Task, batch: Batch, calls: Calls) -> str:
    """Call the forward; why that is not possible, "" where it is.

    Args:
        module: a copy of the model on the meta device.
        task: its forward is called.
        batch: on any device.
        calls: the shapes and the operations of each module, by its name.
    """
    from torch.utils.flop_counter import FlopCounterMode  # only here: it imports much of torch

    counter, begun = FlopCounterMode(display=False), list[int]()

    def before(module: nn.Module, args: object) -> None:
        begun.append(counter.get_total_flops())

    def after(path: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, args: object, output: object) -> None:
            flops = counter.get_total_flops() - begun.pop()
            shapes, total = calls.get(path, (_shapes(output), 0))
            calls[path] = shapes, total + flops

        return note

    for path, inner in module.named_modules():
        inner.register_forward_pre_hook(before)
        inner.register_forward_hook(after(path))
    try:
        with seeded_all(0), torch.no_grad(), torch.device("meta"), counter:
            task.forward(module, map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception as error:  # whatever a forward raises that reads numbers, or needs a device
        calls.clear()
        reason = (str(error) or "no message").strip().splitlines()[0]
        return (
            f"Outputs and FLOPs are not known: a forward on the meta device failed ({type(error).__name__}: {reason})."
        )
    return ""


def _shapes(output: object) -> tuple[tuple[int, ...], ...]:
    shapes: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(note, output)
    return tuple(shapes)
