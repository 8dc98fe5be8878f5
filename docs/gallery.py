"""Draw the pictures of docs/gallery.md anew: ``python docs/gallery.py [NAME ...]``, which takes some minutes.

Each picture is drawn by its example, and then made small enough for a page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

__all__ = ["EXAMPLES", "LARGEST", "draw", "main"]

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
LARGEST = 60_000  # bytes

EXAMPLES = (
    *("fork", "early_stopping", "gan", "confusion", "digits", "kfold", "reinforce", "logged", "sweep", "images"),
    *("finetune_lora", "distillation", "sweep_of_rates", "population_based"),
)


def draw(name: str) -> Path:
    """Run an example as its documentation says, and keep its picture."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / f"{name}.png"
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--output", str(drawn)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True)
        return _small(drawn, PICTURES / f"{name}.png")


def _small(drawn: Path, path: Path) -> Path:
    with Image.open(drawn) as opened:
        picture = opened.convert("RGB")
    picture.thumbnail((900, 900))
    for colours in (256, 128, 64, 32, 16):
        picture.quantize(colours).save(path, optimize=True)
        if path.stat().st_size < LARGEST:
            return path
    raise ValueError(f"{path} has {path.stat().st_size} bytes with 16 colours; at most {LARGEST} are shown on a page")


def main(names: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in names or EXAMPLES:
        print(draw(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
