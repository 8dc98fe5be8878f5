"""torch's profiler on a device, and what is read off it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

__all__ = ["inside", "kernels", "profiled"]


def profiled(device: str) -> Any:
    """The profiler of the host, and of the device where it can be watched."""
    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    return profile(activities=[each for each in wanted if each in supported_activities()], acc_events=True)


def kernels(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Seconds a step in which kernels ran, and how many; None where the profiler sees none."""
    found = [
        event.time_range.elapsed_us()
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return {"busy": sum(found) / 1e6 / steps if found else None, "kernels": len(found) / steps if found else None}


def inside(events: Iterable[Any], span: str) -> Counter[str]:
    """What the host did inside the spans of this name, by name."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    spans = [(each.time_range.start, each.time_range.end) for each in host if each.name == span]
    return Counter(
        each.name
        for each in host
        if each.name != span and any(start <= each.time_range.start <= end for start, end in spans)
    )
