"""What callbacks refuse, at once or where the run begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pure_loop as pl
from pure_loop import callbacks as C
from tests.support.problem import fit, points
from tests.support.refused import Refusal, check, rows

ARG, TYPE = pl.errors.ArgumentError, pl.errors.ArgumentTypeError
INPUTS = points(1, size=5)[0][0]


def own(name: str, **methods: Any) -> Any:
    """A callback that observes the end of a run."""
    return type(name, (pl.Callback,), {"fit_end": lambda self, state, logger: None, **methods})


def never(self: Any, run: Any) -> None:
    raise ARG(f"never in {run.function}")


def made(make: Any, error: type[Exception], *says: str, **settings: Any) -> Refusal:
    name = " ".join([make.__name__, *(f"{key}={str(value)[:20]}" for key, value in settings.items())])
    return Refusal(name, lambda: make(**settings), error, says)


def attached(callback: Callable[[], Any], error: type[Exception], *says: str) -> Refusal:
    return Refusal(says[0], lambda: fit(callbacks=[callback()], evaluators={"val": points(1)}), error, says)


def driven(callback: Callable[[], Any], *says: str) -> Refusal:
    return Refusal(says[0], lambda: pl.drive((pair for pair in ()), callbacks=[callback()]), ARG, says)


def explain(**options: Any) -> Any:
    settings: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    return pl.explain(nn.Linear(4, 3), points(), max_duration="1ep", **settings, **options)


def generate(**settings: Any) -> Any:
    return C.Generate(**{"prompts": "a", "generate": lambda module, prompt: "", **settings})


def export(**settings: Any) -> Any:
    return C.ExportForInferenceCallback("model.pt2", "torch.export", **settings)


def mlperf(metric: str = "val/loss", **settings: Any) -> Any:
    return C.MLPerfCallback("folder", "points", 0.5, metric, **settings)


REFUSALS = [
    attached(own("Never", bind=never), ARG, "never in fit"),
    Refusal("explained", lambda: explain(callbacks=[own("Never", bind=never)()]), ARG, ("never in fit",)),
    attached(own("Binding", bind=lambda self, name, value: None), TYPE, "Binding has a method bind(name", "the run"),
    attached(own("Alone", needs_grad_norm=True), ARG, "Alone has needs_grad_norm = True, and not all_ranks = True"),
    driven(C.LRMonitor, "write LRMonitor(optimizer)"),
    driven(C.ActivationMonitor, "ActivationMonitor in pl.drive"),
    driven(lambda: C.SpeedMonitor(flops="count"), "has no task that could be counted"),
    made(C.LRMonitor, TYPE, "optimizer of the run", optimizer=0.1),
    made(C.SpeedMonitor, TYPE, "window must be a number of batches", window=1.5),
    made(C.SpeedMonitor, ARG, "flops", flops=float("nan")),
    *(made(C.SpeedMonitor, TYPE, "flops", flops=value) for value in ("all", lambda: 1)),
    made(C.SpeedMonitor, ARG, "peak_flops", peak_flops=float("nan")),
    made(C.SystemMonitor, ARG, "interval", interval="10ba"),
    made(C.ActivationMonitor, TYPE, "only", only=3),
    made(C.ActivationMonitor, ARG, "statistics", statistics=["median"]),
    made(C.ActivationMonitor, ARG, "statistics", statistics=[]),
    made(generate, ARG, "prompts are empty", prompts=[]),
    made(generate, TYPE, "prompts hold 3 of type int", prompts=["a", 3]),
    made(generate, TYPE, "generate must be a function of (module, prompt)", generate="text"),
    made(C.ImageVisualizer, TYPE, "outputs", outputs="logits"),
    made(C.ImageVisualizer, TYPE, "mean", mean="0.5"),
    made(C.ImageVisualizer, ARG, "std", std=[1.0, -1.0]),
    made(C.ExportForInferenceCallback, TYPE, "3 is no path", path=3),
    made(C.ExportForInferenceCallback, ARG, "format", path="model.onxx", format="onxx"),
    made(C.ExportForInferenceCallback, ARG, 'suffix of format="onnx"', path="model.onnx", format="module"),
    made(C.ExportForInferenceCallback, ARG, "names no format", path="model-{epoch}"),
    made(export, ARG, "give sample=inputs"),
    made(export, ARG, "tensor (1, 4)", "give more, or write dynamic_batch=False", sample=INPUTS[:1]),
    attached(lambda: mlperf("val/los", mode="min"), ARG, "there is no metric 'val/los'; did you mean 'val/loss'"),
    made(mlperf, ARG, "that of an evaluation", metric="train/loss"),
    made(mlperf, ARG, 'write mode="min" or mode="max"', metric="val/other"),
    made(mlperf, TYPE, "settings", settings=["opt_name"]),
    made(mlperf, TYPE, "'model' is Sequential", settings={"model": nn.Sequential()}),
]


@rows(REFUSALS)
def test_what_cannot_be_done_is_refused(refusal: Refusal) -> None:
    check(refusal)


def test_a_path_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place, events = tmp_path / "file" / "model.pt", list[pl.Event]()
    for callback in (C.MLPerfCallback(place, "points", 0.5, "val/loss"), C.ExportForInferenceCallback(place)):
        with pytest.raises(OSError, match="file"):
            events.extend(event for event, _ in fit(callbacks=[callback], evaluators={"val": points(1)}))
    assert pl.Event.BATCH_START not in events
