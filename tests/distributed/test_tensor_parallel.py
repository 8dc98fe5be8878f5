"""Layers cut over ranks, on four real processes: the law of several ranks, and what can be said to be equal besides."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import testing
from pure_loop.data.group import Share
from pure_loop.distributed import Parallel, data_rank
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.errors import ModelError
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import LawViolation, cases
from pure_loop.testing.laws._streams import in_float64
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import Pool, RankError
from tests.support.cutting import DRAWING, NARROW, PROBLEM, Residual, cut, cut_over, mesh
from tests.support.sharding import last
from tests.support.tiers import examples, tiers
from tests.support.worlds import ALGORITHMS, KINDS, told

pytestmark = pytest.mark.slow  # four processes
TOLERANCE = 1e-12
OPTIMIZERS = {
    "momentum": lambda: pl.optim.sgd(lr=0.1, momentum=0.9),
    "adamw": lambda: pl.optim.adamw(lr=0.01),
    "lion": lambda: pl.optim.lion(lr=1e-3),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.AdamW, lr=0.01),
}
EVALUATED = Plan(batches=(8, 5, 1), max_duration="4ba", evaluators={"val": EvaluatorPlan((3,), "1ba")})
MESHES = {"shard": ((2, 2), ("data", "tp")), "replicate": ((2, 2), ("tp", "data")), "tp alone": ((4,), ("tp",))}


@pytest.fixture(scope="module")
def four():
    with Pool(4, checked=False, timeout=300) as pool:
        yield pool


def parallel(way):
    return cut_over("shard" if way == "shard" else "replicate", *MESHES[way])


def holds(pool, case, wanted, way="shard", **options):
    def program(rank):
        return witness(case.stream(parallel=parallel(way), **{key: make() for key, make in options.items()}))

    for rank, seen in enumerate(pool.run(program)):
        compare(seen, wanted, f"{way}: rank {rank} of 4", TOLERANCE)


@given(
    cases(problems=[PROBLEM], optimizers=["sgd"], precisions=["fp32"]),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(MESHES)),
)
@examples(fast=2, thorough=40)
def test_ranks_that_cut_layers_are_one_rank(four, case, name, way):
    """Law world_size, in float64: plans with microbatches, evaluations, clipping, and batches of one sample."""
    if way != "tp alone":
        case = attrs.evolve(case, problem=NARROW)
    case, make = in_float64(case), OPTIMIZERS[name]
    data_ranks = 1 if way == "tp alone" else 2
    holds(four, case, witness(whole(case, data_ranks).stream(optimizer=make())), way, optimizer=make)


def test_dropout_is_that_of_data_ranks(four):
    """Ranks with the same data draw the same masks: as one rank, where there is no other data, and else as two."""
    case = in_float64(testing.Case(plan=Plan(batches=(8, 6), max_duration="3ba"), problem=DRAWING))
    with Pool(2, checked=False) as two:
        of_two = two.run(lambda rank: witness(case.stream(parallel="replicate")))[0]
    holds(four, case, witness(case.stream()), "tp alone")
    for way in KINDS:
        holds(four, case, of_two, way)


@pytest.mark.parametrize("name", tiers(ALGORITHMS, ["composed", "clip_adaptive", "asam"]))
def test_algorithms_of_the_library_keep_the_law(four, name):
    make = ALGORITHMS[name]
    case = in_float64(testing.Case(plan=EVALUATED, problem=PROBLEM, clip_grad=0.05))
    holds(four, case, witness(whole(case, 2).stream([make()])), algorithms=lambda: [make()])


# Every law can fail.


def _of_ranks(*, share=False, norm=False, seeds=False):
    """A wrong loop: shares of batches by the global rank; norms of what a rank holds; seeds by the global rank."""
    stack = ExitStack()
    if share:
        wrong = lambda rank, ranks, *rest: Share(torch.distributed.get_rank(), 4, *rest)  # noqa: E731
        stack.enter_context(patch("pure_loop.entry.parallel.Share", wrong))
    if norm:
        stack.enter_context(patch("pure_loop._internal.tree_ops.sum_over_shards", lambda values, *_, **__: values))
    if seeds:
        stack.enter_context(
            patch.object(MultiRankEngine, "rank", property(lambda self: self.talk.rank, lambda *_: None))
        )
    return stack


@pytest.mark.parametrize("wrong", ["share", "norm", "seeds"])
def test_a_wrong_loop_fails_the_law(four, wrong):
    problem = DRAWING if wrong == "seeds" else PROBLEM
    case = in_float64(testing.Case(plan=Plan(batches=(8, 8), max_duration="2ba"), problem=problem, clip_grad=0.05))
    way = "tp alone" if wrong == "seeds" else "shard"

    def program(rank):
        with _of_ranks(**{wrong: True}):
            return witness(case.stream(parallel=parallel(way)))

    single = witness(case.stream())

    def law():
        for seen in four.run(program):
            compare(seen, single, wrong, TOLERANCE)

    with pytest.raises((LawViolation, RankError)):
        law()


# Checkpoints, models without numbers, faults.


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, generator=generator).double(), torch.randn(6, 2, generator=generator).double())
        for _ in range(4)
    ]


def model():
    torch.manual_seed(0)
    return Residual().double()


def train(module=None, duration="2ep", **options):
    options = {"optimizer": pl.optim.adamw(lr=0.01), "algorithms": [pl.algorithms.ema(half_life="3ba")], **options}
    return pl.fit(module or model(), batches(), loss=nn.functional.mse_loss, max_duration=duration, **options)


def same(one, other, tolerance=TOLERANCE):
    for path, leaf in other.items():
        if isinstance(leaf, torch.Tensor) and path[0] in ("params", "opt_state", "algorithm_state"):
            torch.testing.assert_close(one[path], leaf, rtol=0.0, atol=tolerance)


OTHERS = ("shard", "tp alone"), ("tp alone", "sharded"), ("replicated", "shard"), ("sharded", "shard")
WAYS = {"one": False, "replicated": "replicate", "sharded": "shard", **dict.fromkeys(MESHES)}


def test_a_checkpoint_of_any_arrangement_is_read_by_any_other(four, tmp_path):
    """Saved in the middle of an epoch; the same arrangement resumes to the same bits."""

    def runs(rank):
        found = {}
        for way in [name for name in WAYS if name != "one"]:
            chosen = {"parallel": WAYS[way] or parallel(way)}
            pl.save(pl.run(train(duration="6ba", **chosen)), tmp_path / way)
            found[way] = last(train(**chosen))
            for before in (way, "one"):
                found[before, way] = last(train(load_path=tmp_path / before, **chosen))
        for before, way in (
            ("shard", "tp alone"),
            ("tp alone", "sharded"),
            ("replicated", "shard"),
            ("sharded", "shard"),
        ):
            found[before, way] = last(train(load_path=tmp_path / before, parallel=WAYS[way] or parallel(way)))
        return found

    pl.save(pl.run(train(duration="6ba")), tmp_path / "one")
    alone = last(train())
    for found in four.run(runs):
        for way, end in found.items():
            same(end, alone)
            if type(way) is tuple and way[0] == way[1]:
                same(end, found[way[0]], 0.0)
    for way in WAYS:
        same(last(train(load_path=tmp_path / way)), alone)


def test_a_model_without_numbers_is_initialised_in_parts(four):
    """As ``torch.manual_seed(seed)`` and the module on one rank, on all; no rank has the numbers of another part."""

    def end(rank, way=None):
        with torch.device("meta"):
            module = Residual()
        torch.manual_seed(rank)
        return last(train(module.double(), seed=5, parallel=WAYS[way] or parallel(way) if way else False))

    alone = end(0)
    for way in [name for name in WAYS if name != "one"]:
        for found in four.run(lambda rank, way=way: end(rank, way)):
            same(found, alone)


def test_without_numbers_on_one_rank():
    """As the module of the same seed; a layer that nothing initialises is refused, and one that is left half empty."""
    with torch.device("meta"):
        empty = Residual()
    torch.manual_seed(5)
    data = [(torch.ones(2, 3), torch.ones(2, 2))]
    options = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba", "seed": 5}
    wanted, found = (pl.run(pl.fit(module, data, **options)).params for module in (Residual(), empty))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    class Half(nn.Linear):
        def reset_parameters(self):
            nn.init.zeros_(self.weight)

    for module, message in (
        (nn.MultiheadAttention(2, 1, device="meta"), r"the model is a MultiheadAttention .* no reset_parameters"),
        (Half(3, 2, device="meta"), r"reset_parameters\(\) of the model, a Half, gives no numbers to 'bias'"),
    ):
        with pytest.raises(ModelError, match=message):
            pl.run(pl.fit(module, data, **options))


def own(rank):
    """Equal on both ranks of a data rank, unless it is the last one of four."""
    return [(x[rank // 2 :: 2] + (rank == 3), y[rank // 2 :: 2]) for x, y in batches()]


def test_faults_are_named_by_the_rank(four):
    """And ranks can train again. Ranks of one data rank that pass other data are refused, of equal shapes."""

    def program(rank):
        class Breaks(Residual):
            def forward(self, x):
                if rank == 1:
                    raise ValueError("a layer broke")
                return super().forward(x)

        torch.manual_seed(0)
        chosen = parallel("shard")
        return [
            told(train(Breaks().double(), parallel=chosen)),
            told(train(parallel=chosen)),
            told(lambda: pl.fit(model(), own(rank), **kwargs(), parallel=attrs.evolve(chosen, data="own"))),
            data_rank(),
        ]

    def kwargs():
        return {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba"}

    for rank, (broken, again, unequal, number) in enumerate(four.run(program)):
        assert ("a layer broke" if rank == 1 else "rank 1 raised ValueError") in broken
        assert again == "nothing"
        assert "rank 3 was given other samples than rank 2: both are data rank 1" in unequal
        assert number == rank  # outside of a stream


def test_what_cannot_be_cut_is_refused(four):
    def program(rank):
        def of(shape, names, kind="shard", **options):
            return told(lambda: train(parallel=cut_over(kind, shape, names, **options)))

        two = ("data", "tp")
        said = {
            "none is called": of((2, 2), ("a", "b")),
            "pipeline parallelism is not built here; torchtitan": of((2, 2), ("pp", "tp")),
            "expert parallelism is not built here": of((2, 2), ("ep", "tp")),
            "one is replicated over": of((2, 1, 2), ("a", "b", "tp"), "replicate"),
            "one is sharded over, or two": of((1, 2, 1, 2), ("a", "b", "c", "tp")),
            "there is no parallelize=": told(lambda: train(parallel=Parallel("shard", mesh=mesh()))),
            "give a DeviceMesh": told(lambda: train(parallel=Parallel("shard", parallelize=cut))),
            "cuts no parameter": of((2, 2), two, parallelize=lambda module, mesh: None),
            "over 4 ranks, which would have unequal parts": told(
                lambda: train(Residual(width=6).double(), parallel=parallel("tp alone"))
            ),
            "gave a int": of((2, 2), two, parallelize=lambda module, mesh: 3),
            "changes the names of parameters": of((2, 2), two, parallelize=lambda module, mesh: nn.Sequential(module)),
            "compile= with Parallel(parallelize=...)": told(lambda: train(parallel=cut_over("shard"), compile=True)),
            "optimizer 'lamb' may need whole parameters, and with parallelize=": told(
                lambda: train(parallel=cut_over("shard"), optimizer=pl.optim.lamb(lr=0.1))
            ),
        }
        return [(wanted, text) for wanted, text in said.items() if wanted not in text]

    assert four.run(program) == [[]] * 4
