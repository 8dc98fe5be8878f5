"""Pure functions of gradients: their norm, three ways to clip them, and those of the samples of a batch.

It may import what stands below the loop's stages: :class:`pure_loop.State`, :class:`pure_loop.Task`, the model and the
data. Begin with ``clipping.py``, functions of mappings of parameter names to tensors; ``samples.py`` maps a model.
"""

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily
from pure_loop.gradients.clipping import (
    clip_adaptively,
    clip_by_norm,
    clip_by_value,
    clipping_factor,
    global_norm,
    in_dtypes_of,
    map_present,
    norms,
)
from pure_loop.gradients.clipping import inner_product as inner_product  # importable, and not listed

if TYPE_CHECKING:
    from pure_loop.gradients.samples import per_sample

__all__ = [
    "clip_adaptively",
    "clip_by_norm",
    "clip_by_value",
    "clipping_factor",
    "global_norm",
    "in_dtypes_of",
    "map_present",
    "norms",
    "per_sample",
]


if not TYPE_CHECKING:
    # What trains has no use for it.
    __getattr__ = _lazily(__name__, {"samples": ("per_sample",)})


def __dir__() -> list[str]:
    return list(__all__)
