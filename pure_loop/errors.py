"""Every error that pure_loop raises.

Each class is a subclass of :class:`PureLoopError` and of the builtin that fits, so that both
``except pl.PureLoopError`` and ``except ValueError`` do what their reader expects. Messages say what
was given, where, and what to write instead.
"""

from __future__ import annotations

__all__ = [
    "AlgorithmReturnError",
    "AlgorithmStructureError",
    "ArgumentError",
    "ArgumentTypeError",
    "CallbackReturnError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "CompileError",
    "DataError",
    "DistributedError",
    "DonatedStateError",
    "FrozenDictError",
    "FrozenStateError",
    "GradientsNotReadyError",
    "ImpurityError",
    "LossError",
    "MissingExtraError",
    "MissingNameError",
    "ModelError",
    "NonFiniteError",
    "OrderError",
    "PureLoopError",
    "ResumeError",
    "StreamAttributeError",
    "TimeFormatError",
    "WrappedModelError",
]


class PureLoopError(Exception):
    """The base of every error of this library."""


class ArgumentError(PureLoopError, ValueError):
    """An argument has the right type and a value that can't be used."""


class ArgumentTypeError(PureLoopError, TypeError):
    """An argument has a type that can't be used."""


class TimeFormatError(ArgumentError):
    """A duration or an interval can't be read."""


class ModelError(ArgumentError):
    """A model can't be trained as it is: no parameters, uninitialised ones, weights rewritten in the forward."""


class WrappedModelError(ArgumentTypeError):
    """A model comes wrapped (DDP, FSDP, scripted, compiled), which would silently give wrong gradients."""


class DataError(PureLoopError, ValueError):
    """A dataloader yields nothing, or a batch can't be counted or split."""


class DistributedError(PureLoopError, RuntimeError):
    """A rank raised, died, hangs or does something else than the others; the message says which one, and where."""


class LossError(PureLoopError, ValueError):
    """A loss is not a scalar tensor, nor a dict of scalars with the key ``total``."""


class OrderError(PureLoopError, ValueError):
    """A stream of events breaks the order of the specification."""


class AlgorithmReturnError(PureLoopError, TypeError):
    """An algorithm returned something that is not a State."""


class AlgorithmStructureError(PureLoopError, ValueError):
    """An algorithm changed the tree, a shape or a dtype where it may not."""


class CallbackReturnError(PureLoopError, TypeError):
    """A callback returned a value; callbacks only observe."""


class GradientsNotReadyError(PureLoopError, RuntimeError):
    """An algorithm read ``state.grads`` at an event before the first AFTER_BACKWARD of its batch."""


class NonFiniteError(PureLoopError, FloatingPointError):
    """A loss or a gradient is NaN or infinite."""


class ImpurityError(PureLoopError, RuntimeError):
    """``strict=True`` saw a State that was already given away change by value."""


class ResumeError(PureLoopError, ValueError):
    """Training can't go on from this State: not at a boundary, or it doesn't fit the model or optimizer."""


class CheckpointError(PureLoopError, ValueError):
    """A file is no checkpoint, is damaged or cut off, or holds what this program doesn't know."""


class CheckpointNotFoundError(PureLoopError, FileNotFoundError):
    """There is no checkpoint at this path."""


class CheckpointWriteError(PureLoopError, OSError):
    """A checkpoint could not be written; what was at its path before is as it was."""


class FrozenDictError(PureLoopError, TypeError):
    """A read-only mapping of a State was written to."""


class MissingNameError(PureLoopError, KeyError):
    """A mapping of a State was asked for a name that it doesn't have; the message says which there are."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError shows its repr


class StreamAttributeError(PureLoopError, AttributeError):
    """A stream was asked for what its States have."""


class FrozenStateError(PureLoopError, AttributeError):
    """A field of a State was assigned to or deleted."""


class DonatedStateError(PureLoopError, RuntimeError):
    """The memory of a State was reused by the step that followed it, and the State was touched all the same."""


class CompileError(PureLoopError, RuntimeError):
    """What was to be compiled can't be traced: what it does depends on the data, or on things outside tensors."""


class MissingExtraError(PureLoopError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
