"""The computations between the events, as pure functions ``State -> State``: forward, loss, backward, update.

May import what is below: ``state``, ``model``, ``task``, ``precision``, ``optim``. Stages know no events,
algorithms or callbacks. Begin with ``stages.py``; its base classes are in ``update.py`` (the optimizer's step) and
``settings.py`` (random numbers, precision); ``engine.py`` is the seam behind which several ranks compute.
"""

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.stages.differentiation import update_part, value_and_grad
    from pure_loop.stages.stages import Stages

__all__ = ["Stages", "update_part", "value_and_grad"]

if not TYPE_CHECKING:
    __getattr__ = _lazily(__name__, {"stages": ["Stages"], "differentiation": ["update_part", "value_and_grad"]})


def __dir__() -> list[str]:
    return list(__all__)
