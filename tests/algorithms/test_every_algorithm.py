"""All algorithms of the library: names, and two real ranks. Laws and ranges: tests/architecture."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.ranges import settings_of
from pure_loop.testing._compositions import ACROSS_MEMBERS, ALGORITHMS, built
from pure_loop.testing.problems import as_problem
from tests.support.problem import fit, points, run
from tests.support.samples import simplest
from tests.support.served import required, served
from tests.support.streams import equal
from tests.support.worlds import pool


def made(name: str) -> pl.Algorithm:
    """With the simplest settings."""
    factory = ALGORITHMS[name]
    needed = {key: st.just(v) for key, v in required(factory).items() if key not in settings_of(factory)}
    return simplest(built(factory, **needed))  # type: ignore[no-any-return]


def test_each_is_exported_and_takes_a_name_which_no_other_may_have() -> None:
    assert all(hasattr(pl.algorithms, name) for name in pl.algorithms.__all__)
    for factory in [*ALGORITHMS.values(), *ACROSS_MEMBERS.values()]:
        one = factory(**required(factory), name="same")
        assert one.name == "same"
        with pytest.raises(pl.errors.ArgumentError, match=r"two algorithms are named 'same'|both claim"):
            fit(None, None, [one, factory(**required(factory), name="same")])


def test_bind_is_called_once_with_the_run() -> None:
    runs: list[Any] = []
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, bind=runs.append)
    run(None, None, [algorithm], evaluators={"val": points(1)}, max_duration="0ba")
    assert [(each.function, list(each.metrics)) for each in runs] == [("fit", ["val"])]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicate", "shard", "compiled"])
def test_two_ranks_train_one_model(way: str) -> None:
    """Two processes, with what each algorithm needs; in a step that is traced those that draw for samples."""
    names = ["mixup", "cutmix", "augmix"] if way == "compiled" else [*ALGORITHMS]

    def program(rank: int, name: str) -> Any:
        problem = as_problem(served(ALGORITHMS[name]) or "mlp")
        options: dict[str, Any] = {"loss": problem.loss, "optimizer": pl.optim.sgd(lr=0.01, momentum=0.9), "seed": 0}
        options |= {"parallel": "shard" if way == "shard" else "replicate", "compile": way == "compiled"}
        options |= {"microbatch_size": 2, "evaluators": {"val": problem.batches((4,), 2)}, "strict": False}
        with interpreted():
            state = run(problem.model(0), problem.batches((8, 8), 1), [made(name)], **options)
        return {key: tensor.detach().clone() for key, tensor in state.module().state_dict().items()}

    for name in names:
        one, two = pool().run(functools.partial(program, name=name))
        equal(one, two)
        assert all(tensor.isfinite().all() for tensor in one.values()), name
