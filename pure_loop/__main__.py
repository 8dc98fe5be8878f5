"""``python -m pure_loop``: the versions, extras and devices of an installation, and what falls back in it.

For a report of a bug, and for a look at why a run is slower or takes more memory than elsewhere. ``--json`` prints the
same as one JSON object. Nothing is trained and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import torch

import pure_loop
from pure_loop._internal import torch_private
from pure_loop.entry.compiling import absent_names

__all__ = ["describe", "main", "render"]

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([\w.-]+)['"]""")


def describe() -> dict[str, Any]:
    """The installation, in values that JSON has.

    Returns:
        A dict with the keys ``versions`` (of packages; None: not installed), ``platform``, ``devices`` (their names),
        ``extras`` (for each the versions of its packages), ``donation`` (``counts_references``, a bool, and what
        follows from it) and ``missing`` (for each gate the private names that this torch lacks, with what is lost).

    >>> sorted(describe())
    ['devices', 'donation', 'extras', 'missing', 'platform', 'versions']
    """
    return {
        "versions": {
            "pure_loop": pure_loop.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "torch": torch.__version__,
            **{package: _version(package) for package in ("optree", "attrs")},
        },
        "platform": platform.platform(),
        "devices": _devices(),
        "extras": _extras(_requirements()),
        "donation": _donation(),
        "missing": {"eager": dict(torch_private.missing), "compiler": dict(absent_names())},
    }


def render(described: dict[str, Any]) -> str:
    """What :func:`describe` gives, as aligned text."""
    rows = [(name, version or "not installed") for name, version in described["versions"].items()]
    rows += [("platform", described["platform"])]
    rows += [("devices" if not index else "", name) for index, name in enumerate(described["devices"])]
    rows += [("donation", described["donation"]["effect"])]
    for extra, packages in described["extras"].items():
        lacking = [package for package, version in packages.items() if version is None]
        if lacking:
            state = f"lacks {', '.join(lacking)}: pip install 'pure_loop[{extra}]'"
        else:
            state = ", ".join(f"{package} {version}" for package, version in packages.items())
        rows.append((f"extra {extra}", state))
    for gate, missing in described["missing"].items():
        title = f"torch, {gate}"
        if not missing:
            rows.append((title, "has every private name that is used"))
        for index, (name, lost) in enumerate(missing.items()):
            rows.append(("" if index else title, f"lacks {name}, which costs: {lost}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the description.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        The exit status, 0.
    """
    parser = argparse.ArgumentParser(
        "python -m pure_loop", description="Versions, extras and devices, and what falls back: for a report of a bug."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    described = describe()
    print(json.dumps(described, indent=2) if options.json else render(described))
    return 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    """Of the installed package; none where it runs from a folder that is not installed."""
    try:
        return metadata.requires("pure_loop") or []
    except metadata.PackageNotFoundError:
        return []


def _extras(requirements: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """For each extra the versions of its packages, those of the extras that it contains included.

    >>> found = _extras(["torch>=2", "nowhere>=1; extra == 'b'", "pure_loop[b]; extra == 'a'"])
    >>> found
    {'a': {'nowhere': None}, 'b': {'nowhere': None}}
    """
    packages: dict[str, list[str]] = {}
    contained: dict[str, list[str]] = {}
    for requirement in requirements:
        read = _REQUIREMENT.match(requirement)
        extra = _EXTRA.search(read[3] or "") if read else None
        if read is None or extra is None:
            continue
        listed, within = packages.setdefault(extra[1], []), contained.setdefault(extra[1], [])
        if read[1].replace("-", "_") == "pure_loop":
            within += [name.strip() for name in (read[2] or "").split(",")]
        else:
            listed.append(read[1])

    def all_of(extra: str, above: frozenset[str]) -> list[str]:
        inner = [name for name in contained.get(extra, []) if name not in above]
        return [*packages.get(extra, []), *(package for name in inner for package in all_of(name, above | {name}))]

    return {
        extra: {package: _version(package) for package in all_of(extra, frozenset({extra}))}
        for extra in sorted(packages)
    }


def _devices() -> list[str]:
    """The CPU and each accelerator, by torch's name for it and the vendor's where torch knows that."""
    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return devices
    name_of = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    for index in range(torch.accelerator.device_count()):
        place = f"{accelerator.type}:{index}"
        devices.append(place if name_of is None else f"{place} ({name_of(index)})")
    return devices


def _donation() -> dict[str, Any]:
    """Whether references can be counted here, on which donation by ``donate="auto"`` rests."""
    from pure_loop.stages.references import can_count, counting_doubt

    if can_count():
        return {
            "counts_references": True,
            "effect": "references are counted: a step reuses the memory of States let go",
        }
    return {
        "counts_references": False,
        "effect": f"references are not counted here ({counting_doubt()}): every step copies parameters and "
        "optimizer state, which takes longer, and memory for both",
    }


if __name__ == "__main__":
    sys.exit(main())
