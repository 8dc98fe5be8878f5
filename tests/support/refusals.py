"""What users write by mistake: an error of ours and of the builtin that fits, which says what to write instead.

Where it can be told from the arguments, it is raised by the call itself, before any event and before any
data is drawn; what only shows when it runs is raised at the first event that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.models import batches

DATA = batches((4, 4, 4), seed=0)
SGD = pl.optim.sgd(lr=0.1)


class Watched(list[Any]):
    """Data that knows whether it was touched."""

    drawn = 0

    def __iter__(self) -> Iterator[Any]:
        self.drawn += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.drawn += 1
        return super().__getitem__(index)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": SGD, "max_duration": "2ba", **changes}
    return pl.fit(net() if model is None else model, data, **arguments)


def refused(call: Callable[[], Any], error: type[Exception], builtin: type[Exception], *says: str) -> None:
    """The call itself raises the error, of ours and of Python's, and says all of this."""
    assert issubclass(error, pl.PureLoopError)
    assert issubclass(error, builtin)
    with pytest.raises(error) as caught:
        call()
    check_message(caught.value, *says)


def check_message(error: BaseException, *says: str) -> None:
    message = " ".join([str(error), *getattr(error, "__notes__", [])])
    for fragment in says:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert " object at 0x" not in message or "metrics" in message or "holds" in message


def breaks(stream: Any, error: type[Exception], builtin: type[Exception], *says: str) -> list[Event]:
    """Running the stream raises the error; gives the events before it."""
    assert issubclass(error, pl.PureLoopError)
    assert issubclass(error, builtin)
    pairs: list[tuple[Event, pl.State]] = []
    with pytest.raises(error) as caught:
        pairs.extend(stream)
    check_message(caught.value, *says)
    return [event for event, _ in pairs]


TYPE, VALUE = (pl.ArgumentTypeError, TypeError), (pl.ArgumentError, ValueError)


def identity(state: pl.State) -> pl.State:
    return state


def named(name: str) -> pl.Algorithm:
    return pl.algorithm(Event.BATCH_END, name=name)(identity)


def at(event: Event, function: Any) -> pl.Algorithm:
    return pl.algorithm(event, name="mine")(function)


@attrs.frozen(eq=False, kw_only=True)
class Wider(pl.State):
    extra: Any = None


WEIGHT = "0.weight"
