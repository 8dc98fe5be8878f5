"""States of several ranks are values: equal from the start, never changed, and training goes on from each, bitwise."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel, replicate
from pure_loop.order import Plan
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.ranks import compare, witness
from tests.support.worlds import KINDS, A, an_epoch, pool


def case_of(sizes=(4, 4), duration="2ep", **options):
    size = options.pop("microbatch_size", None)
    return testing.Case(plan=Plan(batches=sizes, max_duration=duration, microbatch_size=size), **options)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def data(sizes=(4,)):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


def test_what_each_rank_brings_is_made_equal_before_training():
    """Parameters and buffers that were initialised differently, of which rank 0's count, and modules stay as they were;
    and what an algorithm puts in at INIT, or writes in place."""

    def program(rank):
        found, mine = [], model(rank)
        mine[1].running_mean.fill_(rank)
        before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
        for kind, order in (*((kind, "current") for kind in KINDS), ("replicate", "2021")):
            stream = an_epoch(mine, data(), parallel=kind, order=order)
            state = next(state for event, state in stream if event is Event.FIT_START)
            found.append(dict(state.module().state_dict()))
            stream.close()
        assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())
        for in_place in (False, True):

            @pl.algorithm(Event.INIT)
            def noise(state, in_place=in_place):
                torch.manual_seed(rank)
                fresh = {name: torch.randn_like(tensor) for name, tensor in state.params.items()}
                if not in_place:
                    return state.replace(params=fresh)
                for name, tensor in state.params.items():
                    tensor.data.copy_(fresh[name])  # an algorithm that isn't pure
                    tensor.add_(0)
                return state

            # By default a write in place is an error at INIT: without the check, what was written is made equal, too.
            options = {"algorithms": [noise], "strict": False if in_place else None, "parallel": "replicate"}
            stream = an_epoch(model(), data(), **options)
            found.append(dict(next(state for event, state in stream if event is Event.BEFORE_LOAD).params))
            stream.close()
        return before, found

    (before, first), *others = pool().run(program)
    for _, other in others:
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)
    for found in first[:3]:
        assert all(torch.equal(found[name], before[name]) for name in before)
    assert not torch.equal(first[3]["0.weight"], before["0.weight"])


def test_going_on_is_bitwise_the_rest(tmp_path):
    """From boundaries, one through a file; in another kind of ranks it is close, and one process is refused.

    No State that was kept has changed by then, and a strict loop finds nothing to complain about.
    """
    case = case_of((5, 3), microbatch_size=2, problem="tied", optimizer="adamw")

    def algorithms():
        return [pl.compose(A.sam(), A.ema(half_life="3ba"), A.gradient_clipping("norm", 0.3))]

    def program(rank):
        found = []
        for kind, another in zip(KINDS, reversed(KINDS), strict=True):
            keeper, pairs = Keeper(), []
            for event, state in case.stream(algorithms(), parallel=kind, strict=True):
                keeper.keep(state)
                pairs.append((event, state))

            def rest(start, kind=kind):
                return witness(case.stream(algorithms(), start=start, parallel=kind))

            for number, (event, state) in enumerate(pairs):
                if event is Event.AFTER_LOAD or (event, state.timestamp.batch) in ((Event.BATCH_END, 1), *ENDS):
                    wanted = witness(pairs[number + 1 :])[event is Event.AFTER_LOAD :]
                    found.append((rest(state)[1:], wanted, 0.0))
                    if event is Event.EPOCH_END:
                        path = str(tmp_path / ("parts.sharded" if kind == "shard" else f"{rank}.safetensors"))
                        pl.save(state, path)
                        found.append((rest(pl.load(path, model=case.model()))[1:], wanted, 0.0))
                        found.append((rest(state, another)[-1:], wanted[-1:], 1e-5))
            assert keeper.changed() is None
        with pytest.raises(pl.errors.ResumeError, match="this State is sharded over several ranks"):
            case.run(algorithms(), start=state, parallel=False)
        return found

    for found in pool().run(program):
        assert len(found) == 10
        for went_on, wanted, tolerance in found:
            compare(went_on, wanted, "going on", tolerance)


ENDS = ((Event.EPOCH_END, 2),)


class Parts(torch.nn.ModuleList):
    """Called in another order than it is registered in, partly frozen, and partly left out."""

    def __init__(self, frozen, unused):
        super().__init__([torch.nn.Linear(n, m) for n, m in ((17, 3), (17, 17), (17, 17), (7, 17), (3, 3))])
        self.order = (3, 1, 2, 0) if unused else (3, 1, 2, 0, 4)
        self[1].requires_grad_(not frozen)

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self[index](x))
        return x


def in_buckets(cap, frozen, unused, microbatch_size):
    """The parameters of a run, and of one that goes on from its second batch."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(13, 7, generator=generator), torch.randn(13, 3, generator=generator)) for _ in range(3)]
    options = {"optimizer": pl.optim.adamw(lr=0.01), "parallel": Parallel(bucket_cap_mb=cap)}
    options |= {"max_duration": "2ep", "microbatch_size": microbatch_size}
    torch.manual_seed(0)
    for event, state in an_epoch(Parts(frozen, unused), data, **options):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            kept = state
    return dict(state.params), dict(pl.run(an_epoch(kept, data, **options)).params)


@pytest.mark.slow  # of three ranks, whose sums can be put together in several ways
def test_resumption_is_bitwise_however_sums_are_put_together():
    """It depends on the bucket that it is in: with several, frozen and unused parameters, and where
    torch has no way to fix its buckets. And where an algorithm is not linear, and batches are of other sizes."""

    @pl.algorithm(Event.AFTER_BACKWARD)
    def clamped(state):
        return state.replace(grads={name: grad.clamp(-0.01, 0.01) for name, grad in state.grads.items()})

    def program(rank):
        found = [in_buckets(None, False, False, None), in_buckets(0.001, True, False, 1)]
        found += [in_buckets(0.002, False, True, None), in_buckets(0.002, False, False, None)]
        with patch.object(replicate, "_fix_buckets", replicate._backward_of_nothing):
            found += [(found[-1][0], each) for each in in_buckets(0.002, False, False, None)]

        def stream(start):
            return an_epoch(start, data((3, 8, 4, 16, 3)), parallel="replicate", algorithms=clamped)

        kept = [state for event, state in stream(torch.nn.Linear(3, 2)) if event is Event.BATCH_END]
        return [*found, *((dict(kept[-1].params), dict(pl.run(stream(state)).params)) for state in kept[:-1])]

    for pairs in pool(3).run(program):
        assert len(pairs) == 10
        for straight, resumed in pairs:
            assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_state_resumes_after_an_error_in_the_stream_that_it_was_kept_of():
    """Of one rank, for which the others wait; in either kind afterwards."""
    case = case_of((6, 4), problem="linear", optimizer="adamw")

    def program(rank):
        @pl.algorithm(Event.BEFORE_LOSS)
        def fails(state):
            if state.timestamp.batch == 2 and rank == 1:
                raise ValueError("on purpose")
            return state

        found = []
        for kind in KINDS:
            every = []
            with pytest.raises((ValueError, pl.errors.DistributedError)):
                every.extend(case.stream([fails], parallel=kind))
            kept = [state for event, state in every if event is Event.BATCH_END][-1]
            for then in KINDS:
                went_on, wanted = (witness(case.stream(parallel=then, **start)) for start in ({"start": kept}, {}))
                found.append((went_on[-1:], wanted[-1:], 0.0 if kind == then else 1e-6))
        return found

    for found in pool().run(program):
        for went_on, wanted, tolerance in found:
            compare(went_on, wanted, "after an error", tolerance)
