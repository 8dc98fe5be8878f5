"""What a graph can't hold: found while a step is traced, and said in an error that names the code and a remedy.

Recurrent layers are left to eager steps. In a graph a layer over a long sequence is thousands of operations, on which a
compiler takes minutes, while torch's own kernels go through it in one call. So a forward that calls one is not traced,
with the loss and the backward that hang on it; the update is compiled all the same.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.compile._torch import Function, Options, fake_tensor_class
from pure_loop.compile.draws import DrawnFromDataError, StrayGeneratorError, TracedGenerator, written
from pure_loop.compile.guards import FORWARD, DefaultDtypeError, GuardedCallError, Part
from pure_loop.compile.tracing import Tracing
from pure_loop.errors import CompileError, PureLoopError
from pure_loop.model.model import ModelDef
from pure_loop.model.structure import found_from

WHERE_POSSIBLE = 'compile="where possible" runs it eagerly between graphs.'
OR_WRONG = "The same batch without compile tells whether the code itself is wrong; if not,"
_DRAW = (
    'Draw from pl.random.generator(seed, "name", state.timestamp.batch, device=...), or inside pl.random.seeded(...); '
    + WHERE_POSSIBLE
)
_NUMERIC = "Compute with tensors instead: torch.where(condition, a, b) for a branch; " + WHERE_POSSIBLE


class Untraceable(CompileError):  # noqa: N818 - users see a CompileError
    """A CompileError that knows which part it is about: ``(kind, event)``, by which that part is left out."""

    def __init__(self, message: str, part: Part = FORWARD, *, runs_eagerly: bool = False) -> None:
        super().__init__(message)
        self.part = part
        # Whether the part runs eagerly with ``compile=True`` as well.
        self.runs_eagerly = runs_eagerly

    def for_users(self) -> CompileError:
        """This error under the name that is documented."""
        error = CompileError(*self.args)
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error

    def let_go(self) -> None:
        """Free what the frames of the trace hold, among it what the graph would have been called with."""
        error: BaseException | None = self
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__


@contextmanager
def naming(tracing: Tracing, what: str, part: Part = FORWARD) -> Iterator[None]:
    """Turn an error of the tracer, raised inside user code, into one that names that code.

    What it doesn't notice is an error, too: writing to memory that others read, which a graph has apart.
    """
    last, of_another_dtype = tracing.mark(), False
    try:
        try:
            yield
        finally:
            # The loop's own code follows, also after an error.
            of_another_dtype = torch.get_default_dtype() is not tracing.default_dtype
            if of_another_dtype:
                torch.set_default_dtype(tracing.default_dtype)
    except PureLoopError:
        raise
    except RecurrentLayerError as error:
        raise Untraceable(f"{what} can't be compiled: it calls a recurrent layer.", part, runs_eagerly=True) from error
    # What torch's tracer raises has no class of its own: NotImplementedError is one of them, a RuntimeError too. Others
    # are of code that wants a number of Python's, and is given one that stands for it.
    except (RuntimeError, TypeError, AttributeError) as error:
        untraceable = Untraceable(f"{what} can't be compiled: {_place(error)}{_reason(error)}", part)
        for note in getattr(error, "__notes__", ()):
            untraceable.add_note(note)
        raise untraceable from error
    if of_another_dtype:
        raise Untraceable(f"{what} can't be compiled: {_reason(DefaultDtypeError())}", part)
    if tracing.stray_draws(last):
        raise Untraceable(
            f"{what} can't be compiled: it draws from torch's global generator, so that no batch could be trained on "
            f"again as it was. {_DRAW}",
            part,
        )
    for node in written(tracing.since(last)):
        if node.op == "get_attr":
            raise Untraceable(
                f"{what} can't be compiled: it writes to a tensor outside of the State. Keep values from step to step "
                f"in the State: state.remember(...), or a buffer of the model; {WHERE_POSSIBLE}",
                part,
            )
        if node in tracing.in_shared_memory():
            raise Untraceable(
                f"{what} can't be compiled: it writes to an argument that shares memory with another tensor (the "
                "targets, if a model learns its inputs), and in a graph each tensor has its own memory. Write to a "
                f"copy: x = x.clone(), or no inplace=True; {WHERE_POSSIBLE}",
                part,
            )


# What torch says of a tensor that has no numbers, and of a number that it can't take for one.
_NUMBERLESS = ("_local_scalar_dense", "tracing tensor", "its data is not allocated yet")
_TAKES_NO_NUMBER = re.compile(
    r"PyList_Check\(arg\) INTERNAL ASSERT|got \([^)]*\bNumber\b"
    r"|^(expand|(new_)?(zeros|ones|empty)|randn?)\(\) takes 1 positional argument but"
)


def _reason(error: BaseException) -> str:
    """What the tracer stumbled over, and what to write instead."""
    text, kind = str(error), type(error).__name__
    if kind == "DataDependentOutputException" or any(element in text for element in _NUMBERLESS):
        return (
            "it reads a number out of a tensor (.item(), float(), int(), bool(), .tolist(), an `if` about a tensor), "
            f"and while a graph is made tensors have no numbers. {_NUMERIC}"
        )
    if isinstance(error, GuardedCallError):
        return f"it calls {text}, and a graph would hold for ever what came of it. {_DRAW}"
    if isinstance(error, DefaultDtypeError):
        return (
            "it computes under another default dtype (torch.set_default_dtype), of which a graph knows nothing: say "
            f"dtype=torch.float64 where a tensor is made, and .to(torch.float64) before integers meet; {WHERE_POSSIBLE}"
        )
    if _TAKES_NO_NUMBER.search(text):
        return (
            "it hands a number of the step to a function of torch's that takes Python's own there, as the first of "
            f"several sizes: write int(number), or the sizes as one tuple; {WHERE_POSSIBLE}"
        )
    if "numpy" in text:
        return f"it hands a tensor to NumPy, which a graph can't hold. {_NUMERIC}"
    if kind == "DynamicOutputShapeException":
        return f"the shape of a result depends on the data (nonzero, unique, boolean indexing). {_NUMERIC}"
    if isinstance(error, StrayGeneratorError):
        return (
            "it draws from a generator of its own, of which no graph knows how far it is, so that no batch could be "
            f"trained on again as it was. {_DRAW}"
        )
    if isinstance(error, DrawnFromDataError):
        return (
            f"it draws random numbers by what the graph is given, or in a way that no graph takes ({text}): write "
            "torch.rand_like(p) < p for torch.bernoulli(p), or mean + std * torch.randn_like(mean) for "
            f"torch.normal(mean, std); {WHERE_POSSIBLE}"
        )
    if any(element in text for element in ("SeedSequence", "manual_seed expected", "has no hash")):
        return f"it seeds a generator of its own with a number that is another one in each step ({text}). {_DRAW}"
    message = text.strip().splitlines()[0] if text.strip() else "no message"
    # It may be the tracer's, or a mistake that eager steps would meet, too.
    return f"{kind}: {message}. {OR_WRONG} {WHERE_POSSIBLE}"


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
# Where no code of a user's is; what a with statement leads through is no place, either.
_BETWEEN = (_TORCH, _OURS, contextlib.__file__, random.__file__)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_BETWEEN)]
    ours = [f for f in frames if f.filename.startswith(str(Path(_OURS) / "algorithms"))]
    chosen = (own or ours)[-1:] if (own or ours) else []
    if not chosen or chosen[0].filename.startswith("<"):
        return ""
    frame = chosen[0]
    code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"in {Path(frame.filename).name}, line {frame.lineno} (`{code}`), "


class Undifferentiated(TorchFunctionMode):
    """Where the forward is in another graph, a gradient would silently end at what that graph gave."""

    def __init__(self, what: str, part: Part) -> None:
        super().__init__()
        self._what, self._part = what, part

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        if function in (torch.autograd.grad, Tensor.backward, torch.autograd.backward):
            raise Untraceable(
                f"{self._what} can't be compiled: it differentiates, and the forward is in another graph, because "
                "an event in between is observed (AFTER_FORWARD or BEFORE_LOSS). Leave that out of watch= and "
                f"callbacks; {WHERE_POSSIBLE}",
                self._part,
            )
        return function(*args, **(kwargs or {}))


def refuse_memory(what: str, memory: PyTree, part: Part) -> None:
    """Refuse what a graph would hold as it was when that was made: what NumPy computes, at once, and generators."""
    leaves: list[object] = optree.tree_leaves(memory, namespace=NAMESPACE)
    if any(isinstance(leaf, TracedGenerator) for leaf in leaves):
        raise Untraceable(f"{what} can't be compiled: its memory is a generator. {_DRAW}", part)
    # By their types: to ask a number anything is to decide by it.
    if any(type(leaf).__module__ == "numpy" for leaf in leaves):
        raise Untraceable(
            f"{what} can't be compiled: its memory is NumPy's, which no graph holds: keep a tensor; {WHERE_POSSIBLE}",
            part,
        )


def refuse_recurrence(what: str, model: ModelDef) -> None:
    """
    Raises:
        Untraceable: a layer of the model is recurrent; its forward runs eagerly.
    """
    layer = recurrent_layer(model.skeleton)
    if layer is not None:
        raise Untraceable(f"{what} is not compiled: {layer} is a recurrent layer.", runs_eagerly=True)


def refuse_kept(what: str, model: ModelDef) -> None:
    """Refuse a forward that hands a tensor to an object outside of the module tree: in a trace it has no numbers."""
    for value in model.referred_to():
        if any(isinstance(result, fake_tensor_class()) for result in found_from(value)):
            raise Untraceable(
                f"{what} can't be compiled: it gives a tensor to an object outside of the module tree to keep (a "
                f"{type(value).__name__}, by a hook or an attribute), and Python runs only while a graph is made. "
                f"Return the tensor from the forward; {WHERE_POSSIBLE}",
            )


def refuse_subclasses(what: str, result: PyTree) -> None:
    """Refuse what a graph can't give: tensors of other classes than torch's own, and those that aren't dense."""
    plain = (Tensor, torch.nn.Parameter, fake_tensor_class())
    for leaf in optree.tree_leaves(result, namespace=NAMESPACE):
        if isinstance(leaf, Tensor) and (type(leaf) not in plain or leaf.layout is not torch.strided):
            raise Untraceable(
                f"{what} can't be compiled: it returned a tensor of class {type(leaf).__name__} and layout "
                f"{leaf.layout}, and a graph gives dense tensors of torch's own class. Return those; {WHERE_POSSIBLE}",
            )


def refuse_plain(before: PyTree, after: PyTree) -> None:
    """A step that may be skipped can't change plain numbers of the optimizer: which ones hold is known to the data."""
    pairs = zip(*(optree.tree_leaves(tree, namespace=NAMESPACE) for tree in (before, after)), strict=False)
    if any(a is not b for a, b in pairs if not isinstance(b, Tensor)):
        raise Untraceable(
            "the optimizer counts steps in Python, or a parameter that has no gradient in this batch, and whether a "
            'step counts depends on its data (nonfinite="skip", or a loss scale): take one of pl.optim, freeze a '
            'parameter without a gradient with requires_grad_(False), or write compile="where possible".',
            ("update", None),
        )


_FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RecurrentLayerError(RuntimeError):
    """A recurrent layer was called while a step was traced."""


def recurrent_layer(module: nn.Module) -> str | None:
    """The name of the first recurrent layer of a model, or its class's where it is the model; None without one.

    >>> recurrent_layer(nn.ModuleDict({"encoder": nn.LSTM(2, 3), "head": nn.Linear(3, 1)}))
    'encoder'
    >>> recurrent_layer(nn.GRU(2, 3))
    'GRU'
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.RNNBase))
    return next((name or type(layer).__name__ for name, layer in layers), None)


class refusing_recurrent_layers(TorchFunctionMode):  # noqa: N801 - a context
    """Inside, on this thread, a call of a recurrent layer is an error."""

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        if function in _FUNCTIONS:
            raise RecurrentLayerError(function.__name__)
        return function(*args, **(kwargs or {}))
