"""Streams of events, as the specification gives them."""

from __future__ import annotations

from hypothesis import strategies as st

from pure_loop._internal.arguments import check_flag
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, Order, Plan, expected
from pure_loop.order import going_on as rest_of
from pure_loop.testing._arguments import check_choices, check_strategy
from pure_loop.testing._plans import ORDERS
from pure_loop.testing._plans import plans as all_plans

__all__ = ["event_streams"]


def event_streams(
    *, order: Order | None = None, plans: st.SearchStrategy[Plan] | None = None, going_on: bool = True
) -> st.SearchStrategy[list[Event]]:
    """The events of whole runs of ``fit``, in order.

    They shrink to the events of ``Plan(batches=(1,), max_duration="1ba")``.

    Args:
        order: ``"current"``, which is the default, or ``"2021"``.
        plans: of the runs, in place of an order; None: :func:`plans` of that order.
        going_on: some of the runs resume from a State kept at a boundary: their streams begin with FIT_START.

    Raises:
        ArgumentError: an order that is not known, or an order and plans.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> from pure_loop.order import check
    >>> stream = find(event_streams(), lambda stream: True)
    >>> check(stream, complete=True)
    >>> len(stream), stream[0], stream[-1]
    (21, Event.INIT, Event.FIT_END)
    """
    where = "event_streams"
    check_flag("going_on", going_on, where=where)
    if plans is None:
        plans = all_plans(orders=check_choices(where, "order", ["current" if order is None else order], ORDERS))
    elif order is not None:
        raise ArgumentError(
            f"{where}: order={order!r} and plans, which have an order of their own; give one of the two."
        )
    return _event_streams(check_strategy(where, "plans", plans, f"{where}(plans=plans(max_batches=3))"), going_on)


@st.composite
def _event_streams(draw: st.DrawFn, plans: st.SearchStrategy[Plan], going_on: bool) -> list[Event]:
    events = expected(draw(plans))
    if not (going_on and draw(st.booleans())):
        return events
    return rest_of(events, draw(st.sampled_from([at for at, event in enumerate(events) if event in BOUNDARIES])))
