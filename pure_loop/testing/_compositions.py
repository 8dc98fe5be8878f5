"""Compositions of the library's own algorithms, with settings that are drawn too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st

from pure_loop.algorithm import Algorithm, Composition, compose
from pure_loop.algorithms import apply_blurpool, blurpool, ema, gradient_clipping, label_smoothing, sam
from pure_loop.algorithms._arguments import check_integer
from pure_loop.errors import ArgumentError, ModelError
from pure_loop.metrics import class_axes
from pure_loop.testing._arguments import check_choices, check_range
from pure_loop.testing.problems import Problem, as_problem

__all__ = ["ALGORITHMS", "algorithms"]

Drawn: TypeAlias = "st.SearchStrategy[Algorithm]"


def _gradient_clipping(**name: Any) -> Drawn:
    kinds = st.sampled_from(("norm", "value", "adaptive"))
    return st.builds(gradient_clipping, kinds, st.floats(0.01, 8.0), **name)


def _ema(**name: Any) -> Drawn:
    fast = st.builds("{}{}".format, st.integers(1, 8), st.sampled_from(("ba", "sp", "tok")))
    slow = st.sampled_from(("1ep", "2ep"))
    interval = st.builds("{}{}".format, st.integers(1, 3), st.sampled_from(("ba", "ep")))
    return st.one_of(
        st.builds(ema, half_life=fast | slow, **name),
        st.builds(ema, half_life=fast, interval=interval, **name),
        st.builds(ema, smoothing=st.floats(0.0, 0.99), interval=interval, **name),
    )


def _sam(**name: Any) -> Drawn:
    rho = st.floats(0.01, 1.0)
    return st.builds(sam, rho=rho, **name) | st.builds(
        sam, rho=rho, interval=st.integers(1, 3), adaptive=st.booleans(), **name
    )


def _label_smoothing(**name: Any) -> Drawn:
    return st.builds(label_smoothing, st.floats(0.0, 0.5), **name)


def _blurpool(**name: Any) -> Drawn:
    return st.builds(blurpool, min_channels=st.just(1), blur_first=st.booleans(), **name)


ALGORITHMS: dict[str, Callable[..., Drawn]] = {
    "gradient_clipping": _gradient_clipping,
    "ema": _ema,
    "sam": _sam,
    "label_smoothing": _label_smoothing,
    "blurpool": _blurpool,
}
"""The library's algorithms by their names, the simplest first."""

_FOR_ANY_PROBLEM = ("gradient_clipping", "ema", "sam")


def algorithms(
    *,
    problem: Problem | str | None = None,
    among: Sequence[str] | None = None,
    min_size: int = 0,
    max_size: int = 3,
) -> st.SearchStrategy[Composition]:
    """Compositions of the library's own algorithms, in any order, some of them twice, with settings of all kinds.

    They shrink to ``compose()``, which does nothing.

    Args:
        problem: what they are to train: label smoothing comes in where targets are classes. None: any problem.
        among: their names, such as ``["ema", "sam"]``. None: all that serve the problem, BlurPool excepted, which makes
            another model of it and is drawn only where it is named.
        min_size, max_size: how many.

    Raises:
        ArgumentError: a name that is not known, an algorithm that can't serve the problem, or a range without a number.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> find(algorithms(), lambda drawn: any(member.name == "sam" for member in drawn.members))
    Composition(members=(Algorithm('sam', after_train_batch),))
    """
    where = "algorithms"
    least = check_integer(where, "min_size", min_size, "algorithms(min_size=1)", least=0)
    most = check_integer(where, "max_size", max_size, "algorithms(max_size=3)", least=0)
    check_range(where, "min_size", least, "max_size", most)
    serving = _FOR_ANY_PROBLEM if problem is None else _serving(as_problem(problem))
    if among is None:
        return _algorithms(tuple(name for name in serving if name != "blurpool"), least, most)
    chosen = check_choices(where, "among", among, ALGORITHMS)
    for name in chosen:
        # Without a problem, whoever names them knows what for.
        if problem is not None and name not in serving:
            raise ArgumentError(
                f"algorithms: among holds {name!r}, which can't serve {as_problem(problem)!r}; there are "
                f"{', '.join(map(repr, serving))}."
            )
    return _algorithms(chosen, least, most)


@functools.cache
def _serving(problem: Problem) -> tuple[str, ...]:
    """The names of the algorithms that can train a problem."""
    names = list(_FOR_ANY_PROBLEM)
    model = problem.model(0)
    (batch,) = problem.batches([2], seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = model.eval()(batch[0])
    if 1 in class_axes(outputs, batch):
        names.append("label_smoothing")
    try:
        apply_blurpool(model, min_channels=1)
        names.append("blurpool")
    except ModelError:
        pass
    return tuple(names)


# Strategies are kept: making them takes much longer than drawing from them.
@functools.cache
def _algorithms(names: tuple[str, ...], min_size: int, max_size: int) -> st.SearchStrategy[Composition]:
    return st.lists(st.sampled_from(names), min_size=min_size, max_size=max_size).map(tuple).flatmap(_composed)


@functools.cache
def _composed(names: tuple[str, ...]) -> st.SearchStrategy[Composition]:
    members = []
    for position, name in enumerate(names):
        before = names[:position].count(name)
        members.append(ALGORITHMS[name](**({"name": st.just(f"{name}_{before + 1}")} if before else {})))
    return st.builds(compose, *members)
