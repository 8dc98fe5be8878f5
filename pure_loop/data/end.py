"""What a source gives in the place of a batch at the end of its data."""

from __future__ import annotations

from typing import Any

__all__ = ["END"]

END: Any = object()
