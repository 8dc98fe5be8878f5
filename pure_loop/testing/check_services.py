"""The check of training services."""

from __future__ import annotations

from collections.abc import Mapping

from pure_loop._internal.suggestions import teaching
from pure_loop.entry.fit import fit
from pure_loop.testing.check import Trial
from pure_loop.testing.laws import OF_SERVICES
from pure_loop.testing.report import Report
from pure_loop.testing.service import Served, Service


@teaching
def check_service(
    service: Service,
    *,
    tolerance: float = 1e-3,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int | None = None,
    quiet: bool = False,
) -> Report:
    """Try the laws of training services, and raise if one doesn't hold.

    Args:
        service: an adapter of a service with ``forward_backward`` and ``optim_step``, in a few lines.
        tolerance: how far results may be apart, as a part of how far the calls move what ``evaluate`` shows, by norms;
            of losses, as a part of the loss. A service whose kernels add in no fixed order may need more.
        expected_failures, skip, quiet: as in :func:`check_algorithm`.
        max_examples: the number of drawn sequences of calls for each law; None: 10.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold; it names the fault, where it is a known one, and the
            fewest calls that show it.
        ArgumentTypeError: ``service`` lacks a method.

    >>> from pure_loop.testing.wrong_services import ReferenceService
    >>> check_service(ReferenceService(), max_examples=2).ok
    True
    """
    return Trial(
        Served(service, tolerance=tolerance), OF_SERVICES, {}, fit, expected_failures, skip, max_examples, quiet=quiet
    ).report()
