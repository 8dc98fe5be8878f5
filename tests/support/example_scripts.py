"""The examples as tests see them: where they are, and what they print and draw."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def assert_picture(path: Path, *, width: int, colors: int) -> None:
    """A PNG of this width or more that shows something: several colours, on a background that isn't all there is."""
    from matplotlib.image import imread

    pixels = (255 * imread(path)[..., :3]).round().astype(int)
    assert pixels.shape[1] >= width
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 3)}) >= colors
    assert 0.005 < (pixels < 250).any(axis=-1).mean() < 0.9


def percentages(text: str, label: str) -> list[float]:
    """The first percentage of each line that begins with this label."""
    found = re.findall(rf"^{re.escape(label)} .*?([\d.]+)%", text, re.MULTILINE)
    assert found, f"no line of {label!r} in:\n{text}"
    return [float(value) for value in found]
