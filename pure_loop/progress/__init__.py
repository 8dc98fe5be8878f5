"""A table and a bar in a terminal or a notebook, plain lines elsewhere.

May import ``loop`` and what is below, and ``callbacks``. Begin with ``display.py``; ``terminal.py`` and
``screens.py`` draw.
"""

from pure_loop.progress.display import progress

__all__ = ["progress"]


def __dir__() -> list[str]:
    return list(__all__)
