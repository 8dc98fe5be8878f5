"""States of several ranks are values: from where they start, going on, and being kept."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.order import Plan
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.ranks import compare, witness
from pure_loop.testing.ranks import RankError
from tests.support.tiers import pairwise, tiers
from tests.support.worlds import ALGORITHMS, KINDS, A, an_epoch, pool


def case_of(sizes=(4, 4), duration="2ep", **options):
    size = options.pop("microbatch_size", None)
    return testing.Case(plan=Plan(batches=sizes, max_duration=duration, microbatch_size=size), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_all_start_from_the_parameters_of_rank_0(kind):
    """And the modules that they were given stay as they are."""

    def program(rank):
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2)
        mine = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        stream = an_epoch(model, [(torch.ones(4, 3), torch.zeros(4, 2))], parallel=kind)
        found = next(state for event, state in stream if event is Event.FIT_START).module().state_dict()
        stream.close()
        assert all(torch.equal(model.state_dict()[name], mine[name]) for name in mine)
        return mine, dict(found)

    (mine, first), (other, second) = pool(kind=kind).run(program)
    assert not torch.equal(mine["weight"], other["weight"])
    for found in (first, second):
        assert all(torch.equal(found[name], mine[name]) for name in mine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(KINDS, ["replicate"]))
def test_going_on_is_bitwise_the_rest(kind):
    """Slow: from each boundary, with SAM, EMA and clipping."""
    case = case_of((5, 3, 4), microbatch_size=2, problem="transformer", optimizer="adamw")
    algorithms = ALGORITHMS["composed"]

    def program(rank):
        pairs = case.run([algorithms()], parallel=kind)
        for number, (event, state) in enumerate(pairs):
            if event in (Event.AFTER_LOAD, Event.BATCH_END, Event.EPOCH_END):
                rest = witness(case.stream([algorithms()], start=state, parallel=kind))[1:]
                wanted = witness(pairs[number + 1 :])[event is Event.AFTER_LOAD :]
                compare(rest, wanted, event.name, 0.0)

    pool(kind=kind).run(program)


def test_a_state_resumes_in_another_kind_and_is_refused_by_one_process():
    case = case_of((5, 3), problem="tied", optimizer="adamw")

    def program(rank):
        found = []
        for kind, other in zip(KINDS, reversed(KINDS), strict=True):
            pairs = case.run([A.ema(half_life="2ba")], parallel=kind)
            kept = next(state for event, state in pairs if event is Event.BATCH_END)
            went_on = case.run([A.ema(half_life="2ba")], start=kept, parallel=other)
            found.append((witness(pairs[-1:]), witness(went_on[-1:])))
        with pytest.raises(pl.ResumeError, match="this State is sharded over several ranks"):
            case.run([A.ema(half_life="2ba")], start=kept, parallel=False)
        return found

    for pairs in pool().run(program):
        for whole_run, went_on in pairs:
            compare(went_on, whole_run, "of another kind", 1e-5)


def test_states_that_differ_are_refused():
    case = case_of((4,), "2ba")

    def program(rank):
        kept = next(state for event, state in case.stream(parallel=False) if event is Event.BATCH_END)
        if rank == 1:
            kept = kept.replace(params={name: tensor + 1 for name, tensor in kept.params.items()})
        case.run(start=kept, parallel="replicate")

    with pytest.raises(RankError, match=r"rank 1 of 2 resumes from another State than rank 0.*params\['weight'\]"):
        pool().run(program)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_kept_never_changes(kind):
    """Nor do leaves of it; and a strict loop finds nothing to complain about."""

    def program(rank):
        for problem in ("tied", "convolution"):
            keeper, kept = Keeper(), []
            case = case_of((5, 4), microbatch_size=2, problem=problem)
            for event, state in case.stream([A.sam()], parallel=kind, strict=True, callbacks=[lambda *pair: None]):
                keeper.keep(state)
                if event is Event.AFTER_FORWARD and kind == "replicate":
                    mapping = state.params
                    name = next(iter(mapping))
                    kept.append((mapping, name, mapping[name], mapping[name].detach().clone()))
            assert keeper.changed() is None
            for mapping, name, tensor, wanted in kept:
                assert torch.equal(tensor, wanted)
                assert torch.equal(mapping[name], wanted)
                assert tensor.requires_grad
            assert not kept or not torch.equal(kept[0][3], kept[-1][3])

    pool().run(program)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "then", "where"), pairwise(KINDS, KINDS, ["everywhere", "on rank 1"]))
def test_a_state_resumes_after_an_error_in_the_stream_that_it_was_kept_of(kind, then, where, tmp_path):
    """Slow: from memory and from a file, in either kind."""
    case = case_of((6, 4), problem="linear", optimizer="adamw")

    def program(rank):
        @pl.algorithm(Event.BEFORE_LOSS)
        def fails(state):
            if state.timestamp.batch == 2 and (where == "everywhere" or rank == 1):
                raise ValueError("on purpose")
            return state

        every = []
        with pytest.raises((ValueError, pl.DistributedError)):
            every.extend(case.stream([fails], parallel=kind))
        kept = [state for event, state in every if event is Event.BATCH_END][-1]
        path = str(tmp_path / ("parts.sharded" if kind == "shard" else f"{rank}.safetensors"))
        pl.save(kept, path)
        starts = (kept, pl.load(path, model=case.model()), None)
        return [
            witness(case.stream(parallel=then, **({} if start is None else {"start": start})))[-1] for start in starts
        ]

    for went_on, from_disk, whole_run in pool(kind="replicate").run(program):
        compare([went_on], [whole_run], "went on", 0.0 if kind == then else 1e-6)
        compare([from_disk], [went_on], "from disk", 0.0)
