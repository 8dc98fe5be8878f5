"""Images and masks as NumPy arrays of bytes, and as PNG files. Imported where images are written: it needs NumPy."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pure_loop._internal.owned_files import naming
from pure_loop.errors import ArgumentError
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._files import file_part

Pixels = npt.NDArray[np.uint8]

# Twelve colours that can be told apart; classes beyond them begin anew.
_COLOURS = np.array(
    [
        *((230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180)),
        *((70, 240, 240), (240, 50, 230), (210, 245, 60), (250, 190, 212), (0, 128, 128), (170, 110, 40)),
    ],
    np.uint8,
)


def as_pixels(images: object, name: str) -> Pixels:
    """Images as ``(n, height, width, channels)`` of uint8; one image alone may come without its n.

    Floats are from 0 to 1, and what lies outside is cut; NaN is black.

    Raises:
        ArgumentError: they have another shape.

    >>> as_pixels(np.array([[[[0.0], [1.0]]]]), "input").tolist()
    [[[[0], [255]]]]
    """
    array = _array(images)
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise ArgumentError(
            f"images {name!r} have shape {tuple(array.shape)}, and images are (n, height, width, channels) with 1, 3 "
            "or 4 channels: permute(0, 2, 3, 1) brings (n, channels, height, width) into this order."
        )
    if array.dtype.kind in "biu":
        return np.clip(array, 0, 255).astype(np.uint8) if array.dtype.kind != "b" else array.astype(np.uint8) * 255
    return np.rint(np.nan_to_num(np.clip(array.astype(np.float64), 0.0, 1.0)) * 255).astype(np.uint8)


def as_masks(masks: Mapping[str, object], pixels: Pixels, name: str) -> dict[str, Pixels]:
    """Masks by name, each ``(n, height, width)`` of uint8.

    Raises:
        ArgumentError: a mask has another shape than the images.
    """
    arrays = {}
    for key, mask in masks.items():
        array = _array(mask)
        array = array[None] if array.ndim == 2 else array
        if array.shape != pixels.shape[:3]:
            raise ArgumentError(
                f"mask {key!r} of images {name!r} has shape {tuple(array.shape)}, and the images have "
                f"{pixels.shape}: a mask is (n, height, width), with the class of each pixel."
            )
        arrays[key] = np.clip(array, 0, 255).astype(np.uint8)
    return arrays


def overlay(pixels: Pixels, mask: Pixels) -> Pixels:
    """Images with the classes of a mask in colours upon them; class 0 stays as it is."""
    coloured = np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels[..., :3]
    colours = _COLOURS[(mask.astype(np.int64) - 1) % len(_COLOURS)]
    mixed = (coloured.astype(np.uint16) + colours) // 2
    return np.where((mask > 0)[..., None], mixed, coloured).astype(np.uint8)


def png(image: Pixels) -> bytes:
    """A file of one image ``(height, width, channels)``.

    >>> png(np.zeros((1, 1, 1), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = image.shape
    kind = {1: 0, 3: 2, 4: 6}[channels]  # grey, RGB, RGBA
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter, 0
    lines[:, 1:] = image.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def layers_of(entry: Entry) -> dict[str | None, Pixels]:
    """Images by None, and masks upon them by their names: each ``(n, height, width, channels)`` of uint8.

    Raises:
        ArgumentError: images or masks of shapes that they can't have.
    """
    images, masks = entry.value
    pixels = as_pixels(images, entry.name)
    arrays = as_masks(masks, pixels, entry.name)
    return {None: pixels, **{str(key): overlay(pixels, mask) for key, mask in arrays.items()}}


def write_images(folder: Path, entry: Entry) -> list[Path]:
    """Write the images of an entry, and its masks upon them, as PNG files; their paths.

    A file is named after the batch, the name, the image's number and the mask, so that a resumed run writes the same.

    Raises:
        ArgumentError: images or masks of shapes that they can't have.
        OSError: they can't be written.
    """
    layers = layers_of(entry)
    with naming(folder, "a logger"):
        folder.mkdir(parents=True, exist_ok=True)
    name = file_part(entry.name)
    paths = []
    for key, layer in layers.items():
        suffix = "" if key is None else f"-{file_part(key)}"
        for index, image in enumerate(layer):
            path = folder / f"ba{entry.moment.batch}-{name}-{index}{suffix}.png"
            with naming(path, "a logger"):
                path.write_bytes(png(image))
            paths.append(path)
    return paths


def packed(entry: Entry) -> dict[str, dict[str, object]]:
    """The images of an entry and its masks as JSON has them: shapes, and compressed bytes.

    Raises:
        ArgumentError: images or masks of shapes that they can't have.
    """
    images, masks = entry.value
    pixels = as_pixels(images, entry.name)
    layers = {"images": pixels} | {f"mask/{key}": mask for key, mask in as_masks(masks, pixels, entry.name).items()}
    return {
        key: {"shape": list(layer.shape), "bytes": base64.b64encode(zlib.compress(layer.tobytes(), 1)).decode()}
        for key, layer in layers.items()
    }


def unpacked(content: Mapping[str, Any]) -> tuple[Pixels, dict[str, Pixels]]:
    """The images and masks of what :func:`packed` returned.

    >>> from pure_loop.loggers._entry import Moment
    >>> images, masks = np.zeros((1, 2, 2, 1), np.uint8), {"targets": np.ones((1, 2, 2), np.uint8)}
    >>> unpacked(packed(Entry("images", "inputs", (images, masks), Moment(), 0.0)))[1]["targets"].tolist()
    [[[1, 1], [1, 1]]]
    """
    layers = {
        key: np.frombuffer(zlib.decompress(base64.b64decode(layer["bytes"])), np.uint8).reshape(layer["shape"])
        for key, layer in content.items()
    }
    return layers.pop("images"), {key.removeprefix("mask/"): layer for key, layer in layers.items()}


def _array(value: object) -> npt.NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    array: npt.NDArray[Any] = np.asarray(value)
    return array
