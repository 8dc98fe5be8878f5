"""The versions, the device and its driver, and what ``python -m pure_loop`` says."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

from bench.gpu.results import Asked, asked, first_line
from bench.gpu.running import ROOT, command

PACKAGES = ("torch", "optree", "attrs", "numpy", "hypothesis", "pytest", "triton", "torchao")


def main(part: Asked) -> None:
    write = part.results.write
    write("python", value=platform.python_version())
    write("platform", value=platform.platform())
    write("processors", value=os.cpu_count())
    for package in PACKAGES:
        try:
            write("packages", package, value=metadata.version(package))
        except metadata.PackageNotFoundError:
            write("packages", package, value=None)
    write("commit", value=_output("git", "rev-parse", "HEAD"))
    if part.kind == "cuda":
        write("driver", value=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))

    import torch

    write("torch", value=torch.__version__)
    write("available", value=part.device == "cpu" or torch.cuda.is_available())
    if part.device == "cpu":
        write("device", value=platform.processor() or platform.machine())
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        write("device", value=properties.name)
        write("capability", value=f"{properties.major}.{properties.minor}")
        write("multiprocessors", value=properties.multi_processor_count)
        write("memory_bytes", value=properties.total_memory)
        write("cuda", value=torch.version.cuda)
        if part.kind == "cuda":
            write("cudnn", value=torch.backends.cudnn.version())
            # The first kernel: what is wrong with the device is said here.
            write("sum", value=float(torch.ones(1000, device="cuda").sum()))

    import pure_loop

    write("pure_loop", value=pure_loop.__version__)
    write("describes", value=_output(*command(part.kind, "pure_loop"), seconds=max(part.left, 1)))


def _output(*arguments: str, seconds: float = 10) -> str:
    """What a program prints, or why it doesn't."""
    try:
        found = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return first_line(error)
    return (found.stdout if found.returncode == 0 else found.stderr).strip()


if __name__ == "__main__":
    main(asked())
