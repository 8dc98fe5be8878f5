"""What counts of references say on this interpreter and this torch: measured once, when it is first needed.

How many references a call itself adds to a count differs between interpreters: CPython 3.14 borrows on its stack what
3.13 refers to. So no such number is written down. Objects of which all references are known are counted in the two
ways in which the package counts, in a list and behind a weak reference, and what comes out is what these counts mean
from then on. Both ways are independent of how a caller passes an argument. Then one reference of each kind is added,
and has to show. Where one does not, or the counter fails, references are not counted, and :attr:`Calibration.doubt`
says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import attrs
import torch

from pure_loop._internal.torch_private import storage_uses, tensor_uses

__all__ = ["Calibration", "Counter", "calibrate", "count_behind"]

Counter = Callable[[Any], int]


@attrs.frozen(kw_only=True)
class Calibration:
    """What counts say of an object that has no other references than those that are named here.

    Attributes:
        count: counts the references to an object, as ``sys.getrefcount`` does; None: it can't be trusted.
        listed: of an object in a list or a tuple, counted by ``map``.
        behind: of an object that nothing refers to, counted behind a weak reference.
        storages: of a tensor's storage in a list, counted by ``map``.
        bases: of the tensor behind a view in a list, counted by ``map``.
        tensor_uses: torch's count for a tensor that Python alone refers to; None: torch's counts can't be trusted.
        base_uses: torch's count for the tensor behind a view that Python refers to as well.
        storage_uses: torch's count for the storage of one tensor, that Python refers to as well.
        doubt: why references are not counted; empty where they are.
    """

    count: Counter | None = None
    listed: int = 0
    behind: int = 0
    storages: int = 0
    bases: int = 0
    tensor_uses: int | None = None
    base_uses: int = 0
    storage_uses: int = 0
    doubt: str = ""

    @property
    def is_trusted(self) -> bool:
        """Whether references are counted."""
        return not self.doubt

    def without_counter(self, doubt: str) -> Calibration:
        """The same where Python's counts can't be trusted."""
        return attrs.evolve(self, count=None, doubt=doubt)


class _Probe:
    """An object to count the references to."""

    __slots__ = ("__weakref__", "attribute")

    attribute: object


class _DoubtError(Exception):
    """A count does not say what it must."""


def calibrate(count: Counter | None) -> Calibration:
    """Measure what this counter and torch's own say.

    Args:
        count: ``sys.getrefcount``; None where the interpreter has none.

    >>> calibrate(sys.getrefcount).doubt
    ''
    >>> calibrate(lambda _: 2**32 - 1).doubt  # of immortal objects
    'one more variable does not show in a count of references'
    """
    torchs = Calibration()
    try:
        torchs = _of_torch()
        return _of_python(count, torchs)
    except _DoubtError as doubt:
        return torchs.without_counter(str(doubt))
    except Exception as error:  # whatever a counter does elsewhere; pl.explain says it
        return torchs.without_counter(f"counting references raised {type(error).__name__}: {error}")


def count_behind(count: Counter, weak: Callable[[], Any]) -> int:
    """What a counter says of the object behind a weak reference."""
    return count(weak())


def _of_torch() -> Calibration:
    if tensor_uses is None or storage_uses is None:
        return Calibration()
    tensor = torch.zeros(2, device="cpu")
    storage = tensor.untyped_storage()
    uses, of_storage = tensor_uses(tensor), storage_uses(storage._cdata)
    view: Any = tensor[:1]
    if storage_uses(storage._cdata) != of_storage + 1 or tensor_uses(tensor) <= uses:
        raise _DoubtError("a view does not show in torch's counts")
    base_uses = tensor_uses(view._base)
    view = None
    view = tensor.__dlpack__()
    if tensor_uses(tensor) <= uses and storage_uses(storage._cdata) <= of_storage:
        raise _DoubtError("a DLPack capsule does not show in torch's counts")
    view = None
    if tensor_uses(tensor) != uses or storage_uses(storage._cdata) != of_storage:
        raise _DoubtError("the end of a reference does not show in torch's counts")
    return Calibration(tensor_uses=uses, base_uses=base_uses, storage_uses=of_storage)


def _of_python(count: Counter | None, torchs: Calibration) -> Calibration:
    if count is None:
        raise _DoubtError("this interpreter does not count references")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise _DoubtError("threads run without a global lock here, and take references while they are counted")
    if torchs.tensor_uses is None:
        raise _DoubtError("this torch does not say how many references it has itself")
    (listed,) = map(count, [_Probe()])
    if [*map(count, (_Probe(),))] != [listed]:
        raise _DoubtError("a reference from a tuple is counted differently from that of a list")

    probe: Any = _Probe()
    weak = ref(probe)
    behind = count_behind(count, weak) - 1  # of `probe`

    def expect(references: int, kind: str) -> None:
        if [*map(count, [weak()])] != [listed + references] or count_behind(count, weak) != behind + references:
            raise _DoubtError(f"{kind} does not show in a count of references")

    more = probe
    expect(2, "one more variable")
    more = [probe]
    expect(2, "a reference from a list")
    more = {"probe": probe}
    expect(2, "a reference from a mapping")
    more = _Probe()
    more.attribute = probe
    expect(2, "a reference from an attribute")
    more = None
    expect(1, "the end of a reference")
    for _, probe in _pairs():
        if weak() is not None and weak() is not probe:
            raise _DoubtError("an object outlives its last reference")
        weak = ref(probe)
        expect(2, "the variable of a loop over a generator")

    tensor = torch.zeros(2, device="cpu")
    storages = [tensor.untyped_storage()]
    (of_storage,) = map(count, storages)
    more = storages[0]
    if [*map(count, storages)] != [of_storage + 1]:
        raise _DoubtError("a reference to a storage does not show in a count of references")
    view = torch.zeros(2, device="cpu")[:1]
    (of_base,) = map(count, [view._base])
    return attrs.evolve(torchs, count=count, listed=listed, behind=behind, storages=of_storage, bases=of_base)


def _pairs() -> Iterator[tuple[int, _Probe]]:
    """What a stream does: its own variable and the consumer's refer to what it has yielded."""
    for number in range(2):
        probe = _Probe()
        yield number, probe
