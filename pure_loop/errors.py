"""Every error that pure_loop raises: ``pl.errors.ArgumentError``.

Each class is a subclass of :class:`PureLoopError`, which is ``pl.PureLoopError``, too, and of the builtin that fits, so
that ``except pl.PureLoopError`` and ``except ValueError`` both work. Messages say what was passed, where, and what to
write instead.
"""

from __future__ import annotations

from typing import Any

from pure_loop._text import one_line, without_long_words, without_secrets

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
    "EventNameError",
    "ExportError",
    "FileInUseError",
    "FileWriteError",
    "ForkedError",
    "FrozenDictError",
    "FrozenStateError",
    "GradientsNotReadyError",
    "IdleAlgorithmError",
    "ImpurityError",
    "LossError",
    "MissingAttributeError",
    "MissingExtraError",
    "MissingNameError",
    "ModelError",
    "NeverIteratedWarning",
    "NonFiniteError",
    "NondeterministicError",
    "OrderError",
    "PureLoopError",
    "RehearsalError",
    "ResumeError",
    "RewindError",
    "RunExistsError",
    "TimeFormatError",
    "VerificationError",
    "WrappedModelError",
]


class PureLoopError(Exception):
    """The base of every error of this library.

    Its text has no password of a URL, no control character but line ends, and no word of more than 1,000 characters:
    names and texts of files may hold any.
    """

    def __str__(self) -> str:
        text = without_long_words(without_secrets(self._message))
        return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))

    @property
    def _message(self) -> str:
        return super().__str__()


class ArgumentError(PureLoopError, ValueError):
    """An argument has the right type and a value that is out of range, or contradicts another argument."""


class ArgumentTypeError(PureLoopError, TypeError):
    """An argument has a wrong type."""


class TimeFormatError(ArgumentError):
    """A duration or an interval can't be read."""


class EventNameError(ArgumentError):
    """A text is no event: it was passed as one, or compared with one, which would never be true."""


class ModelError(ArgumentError):
    """A model can't be trained as it is: no parameters, uninitialised ones, weights rewritten in the forward."""


class WrappedModelError(ArgumentTypeError):
    """A model is wrapped (DDP, FSDP, scripted, compiled), which would silently give wrong gradients."""


class DataError(PureLoopError, ValueError):
    """A dataloader yields nothing, or a batch can't be counted or split."""


class DistributedError(PureLoopError, RuntimeError):
    """A rank raised, died, hangs or does something else than the others; the message names the rank and the event."""


class ForkedError(PureLoopError, RuntimeError):
    """A child process continues the stream of the process that it was forked from."""


class LossError(PureLoopError, ValueError):
    """A loss is not a scalar tensor, nor a dict of scalars with ``total``, or broadcasts outputs and targets."""


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
    """A loss or a gradient is NaN or infinite.

    Attributes:
        state: the State before the update, with its batch, if the step has not written to its parameters; else None.
        index: the number of the batch, from 0: ``timestamp.batch`` inside it.
        batch: the batch; None: not known, as where an accelerator is only asked later.
        kind: what was first not finite: ``"batch"``, ``"parameter"``, ``"buffer"``, ``"output"`` (of a module),
            ``"loss"``, ``"algorithm"``, ``"gradient"`` or ``"step"`` (of the optimizer); None: not known.
        name: of the parameter, buffer or module, or the path in the batch.
        rows: of the batch, from 0, in which it is not finite; empty: not by rows.
    """

    state: Any = None
    index: int | None = None
    batch: Any = None
    kind: str | None = None
    name: str | None = None
    rows: tuple[int, ...] = ()


class ImpurityError(PureLoopError, RuntimeError):
    """``strict=True`` found that a State changed by value after it was yielded or passed to user code."""


class IdleAlgorithmError(PureLoopError, RuntimeError):
    """``pl.blame`` found, with ``strict``, that an algorithm changed nothing in a whole run."""


class RehearsalError(PureLoopError, RuntimeError):
    """A rehearsal found what would end the run; the message names each phase, and the cause is the first error.

    Attributes:
        failures: the name of each phase that failed, and its error.
    """

    failures: tuple[tuple[str, Exception], ...] = ()


class ResumeError(PureLoopError, ValueError):
    """Training can't resume from this State: not at a boundary, or it doesn't fit the model or optimizer."""


class RewindError(PureLoopError, RuntimeError):
    """What ``rewind`` trains again is not what was recorded, or no batch of the record is what it was asked for."""


class RunExistsError(ArgumentError, FileExistsError):
    """A folder or a file holds what another run has left, and this one would replace it."""


class CheckpointError(PureLoopError, ValueError):
    """A file is no checkpoint, is damaged or truncated, or holds values of unknown classes."""


class CheckpointNotFoundError(PureLoopError, FileNotFoundError):
    """There is no checkpoint at this path."""

    @property
    def _message(self) -> str:
        return self.strerror or super()._message  # OSError adds the path, which the message has


class CheckpointWriteError(PureLoopError, OSError):
    """A checkpoint could not be written; the file that was at its path is unchanged."""


class FileWriteError(PureLoopError, OSError):
    """A file of a logger or a callback could not be written: the disk is full, or it is not allowed; names the file."""

    @property
    def _message(self) -> str:
        return self.strerror or super()._message  # OSError adds the path, which the message has


class FileInUseError(PureLoopError, BlockingIOError):
    """Another process writes to the file, and goes on; names both."""

    @property
    def _message(self) -> str:
        return self.strerror or super()._message


class ExportError(PureLoopError, RuntimeError):
    """A model could not be exported, or what was loaded from the file differs from the model."""


class FrozenDictError(PureLoopError, TypeError):
    """A read-only mapping of a State was written to."""


class MissingNameError(PureLoopError, KeyError):
    """A mapping of a State doesn't have this name; the message lists the names that it has."""

    @property
    def _message(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError shows its repr


class MissingAttributeError(PureLoopError, AttributeError):
    """A State, a stream, a timestamp or a mapping has no such attribute; the message says where the value is."""


class NeverIteratedWarning(RuntimeWarning):
    """A stream was dropped that was never iterated over: nothing was computed."""


class FrozenStateError(PureLoopError, AttributeError):
    """A field of a State was assigned to or deleted."""


class DonatedStateError(PureLoopError, RuntimeError):
    """A State was accessed after the step that followed it had overwritten its memory."""


class CompileError(PureLoopError, RuntimeError):
    """Code can't be compiled: it depends on values of tensors, or on state outside of tensors."""


class NondeterministicError(PureLoopError, RuntimeError):
    """With ``deterministic=True`` an operation ran that has no deterministic implementation."""


class VerificationError(PureLoopError, RuntimeError):
    """A batch that ``verify=`` computed twice from the same State gave two results, or ranks have other parameters.

    Attributes:
        stage: after which the two first differ: ``"forward"``, ``"loss"``, ``"backward"``, ``"gradients: scale,
            clip"``, ``"optimizer"`` or the name of an algorithm; None: the difference is one between ranks.
        leaf: the first leaf that differs there, such as ``"grads/0.weight"``.
        difference: the L2 norm of its difference; None where it has none.
        rank: the one rank on which they first differ; None: they differ on several at once.
        batch: the number of the batch, from 0.
        timestamp: after the batch.
        transient: whether a third run agrees with one of the two, on all ranks.
        agreeing: the numbers of the two runs that agree, such as ``(1, 3)``; None: no two do.
    """

    stage: str | None = None
    leaf: str | None = None
    difference: float | None = None
    rank: int | None = None
    batch: int = 0
    timestamp: object = None
    transient: bool = False
    agreeing: tuple[int, int] | None = None


class MissingExtraError(PureLoopError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def __dir__() -> list[str]:
    return list(__all__)
