"""Finding the best checkpoint of a folder, by the scores that were saved in them."""

from __future__ import annotations

from typing import Literal

from pure_loop._internal.suggestions import nearest, teaching
from pure_loop.checkpoint.finding import Found, first_whole, found_in, refuse_file, verified
from pure_loop.checkpoint.storage import PathLike
from pure_loop.errors import ArgumentError

__all__ = ["best"]


@teaching
def best(folder: PathLike, *, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> str | None:
    """The path of the best checkpoint in a folder that is whole; None if no checkpoint has a score.

    ``CheckpointSaver(folder, keep_best=1, metric="val/loss", mode="min")`` saves the score with each State at which the
    metric was measured, and ``pl.save(state, path, notes={"metric": "val/loss", "mode": "min", "score": 0.25})`` does
    the same; weights that are saved alone count as well. Checkpoints of all runs in the folder are compared. Of several
    that are as good, the one with the fewest batches is taken. No link is followed. A checkpoint that is damaged is
    skipped, with a message to the log ``pure_loop.checkpoint``.

    Args:
        folder: a folder or a URL.
        metric: by which; None: by the only one that there is.
        mode: whether the best score is the largest, ``"max"``, or the smallest, ``"min"``; None: as it was saved.

    Raises:
        ArgumentTypeError: ``folder`` is no path.
        ArgumentError: it is a file; there are scores of several metrics and ``metric`` is None; there is no score of
            this metric; whether the largest or the smallest is the best isn't known.

    >>> best("a/folder/that/is/not/there") is None
    True
    """
    refuse_file(folder)
    if mode not in ("min", "max", None):
        raise ArgumentError(f'mode={mode!r}: is the best the largest, mode="max", or the smallest, mode="min"?')
    scored = [item for item in found_in(folder, weights=True) if item.score is not None]
    metrics = sorted({item.metric for item in scored if item.metric is not None})
    if not metrics:
        return None
    if metric is None and len(metrics) > 1:
        raise ArgumentError(f"{folder} has scores of {', '.join(metrics)}: say by which, metric={metrics[0]!r}.")
    if metric is not None and metric not in metrics:
        near = nearest(str(metric), metrics)
        raise ArgumentError(
            f"metric={metric!r}: no checkpoint in {folder} has its score{f'; did you mean {near!r}?' if near else ''}; "
            f"there are {', '.join(metrics)}."
        )
    chosen = [item for item in scored if metric is None or item.metric == metric]
    largest = (mode or _saved_mode(chosen)) == "max"
    # Those furthest on come first, so that of one batch the end of its epoch does.
    chosen.sort(key=lambda item: (_signed(item, largest=largest), item.batch))
    return first_whole(chosen, verified, [])


def _saved_mode(chosen: list[Found]) -> str:
    """
    Raises:
        ArgumentError: the checkpoints disagree, or don't say.
    """
    modes = {item.mode for item in chosen}
    if len(modes) > 1 or None in modes:
        said = "do not all say" if None in modes else "say both"
        raise ArgumentError(
            f"checkpoints with a score of {chosen[0].metric} {said} whether the best is the largest or the smallest: "
            'write mode="max" or mode="min".'
        )
    return str(modes.pop())


def _signed(item: Found, *, largest: bool) -> float:
    assert item.score is not None
    return -item.score if largest else item.score
