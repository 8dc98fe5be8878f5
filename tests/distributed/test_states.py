"""States of several ranks are values: from where they start, going on, and being kept."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.order import Plan
from pure_loop.testing import LawViolation
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.ranks import compare, witness
from pure_loop.testing.ranks import RankError
from tests.support.tiers import pairwise, tiers
from tests.support.worlds import ALGORITHMS, KINDS, A, pool

# What ranks start from, and what differs between them.


@pytest.mark.parametrize("kind", KINDS)
def test_all_start_from_the_parameters_of_rank_0(kind):
    def program(rank):
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2)
        mine = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))]
        stream = pl.fit(
            model,
            data,
            loss=torch.nn.functional.cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            parallel=kind,
        )
        first = next(state for event, state in stream if event is Event.FIT_START)
        found = first.module().state_dict()
        stream.close()
        kept = all(torch.equal(model.state_dict()[name], mine[name]) for name in mine)
        return mine, dict(found), kept

    (mine, first, kept), (other, second, also_kept) = pool(kind=kind).run(program)
    assert kept
    assert also_kept
    assert not torch.equal(mine["weight"], other["weight"])
    for found in (first, second):
        assert all(torch.equal(found[name], mine[name]) for name in mine)


# Going on.


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(KINDS, ["replicate"]))
def test_going_on_is_bitwise_the_rest(kind):
    case = testing.Case(
        plan=Plan(batches=(5, 3, 4), max_duration="2ep", microbatch_size=2),
        problem="transformer",
        optimizer="adamw",
    )
    algorithms = ALGORITHMS["composed"]

    def program(rank):
        dist_state = case.run([algorithms()], parallel=kind)
        problems = []
        for number, (event, state) in enumerate(dist_state):
            if event not in (Event.AFTER_LOAD, Event.BATCH_END, Event.EPOCH_END):
                continue
            rest = witness(case.stream([algorithms()], start=state, parallel=kind))[1:]
            wanted = witness(dist_state[number + 1 :])
            wanted = wanted[1:] if event is Event.AFTER_LOAD else wanted
            if [each.event for each in rest] != [each.event for each in wanted]:
                problems.append((event, "events"))
                continue
            try:
                compare(rest, wanted, event.name, 0.0)
            except LawViolation as error:
                problems.append((event, str(error)))
        return problems

    assert pool(kind=kind).run(program) == [[], []]


def test_a_replicated_state_resumes_sharded():
    case = testing.Case(plan=Plan(batches=(5, 3), max_duration="2ep"), problem="tied", optimizer="adamw")

    def program(rank):
        pairs = case.run([A.ema(half_life="2ba")], parallel="replicate")
        kept = next(state for event, state in pairs if event is Event.BATCH_END)
        went_on = case.run([A.ema(half_life="2ba")], start=kept, parallel="shard")[-1][1]
        return witness([pairs[-1]]), witness([(Event.FIT_END, went_on)])

    for replicated, sharded in pool().run(program):
        compare(sharded, replicated, "sharded", 1e-5)


def test_states_that_differ_are_refused():
    case = testing.Case(plan=Plan(batches=(4,), max_duration="2ba"))

    def program(rank):
        kept = next(state for event, state in case.stream(parallel=False) if event is Event.BATCH_END)
        if rank == 1:
            kept = kept.replace(params={name: tensor + 1 for name, tensor in kept.params.items()})
        case.run(start=kept, parallel="replicate")

    with pytest.raises(RankError, match=r"rank 1 of 2 resumes from another State than rank 0.*params\['weight'\]"):
        pool().run(program)


# States of several ranks are values.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", ["tied", "convolution"])
def test_a_state_that_was_kept_never_changes(kind, problem):
    plan = Plan(batches=(5, 4), max_duration="2ep", microbatch_size=2)
    case = testing.Case(plan=plan, problem=problem)

    def program(rank):
        keeper = Keeper()
        for _, state in case.stream([A.sam()], parallel=kind):
            keeper.keep(state)
        found = keeper.changed()
        return None if found is None else str(found[1])

    assert pool().run(program) == [None, None]


def test_leaves_that_were_kept_stay_as_they_were():
    def program(rank):
        case = testing.Case(plan=Plan(batches=(4, 4), max_duration="2ep"))
        kept = []
        for event, state in case.stream(parallel="replicate"):
            if event is Event.AFTER_FORWARD:
                mapping, tensor = state.params, state.params["weight"]
                kept.append((mapping, tensor, {**mapping}, tensor.detach().clone()))
        assert not torch.equal(kept[0][3], kept[-1][3])
        return all(
            torch.equal(tensor, wanted)
            and torch.equal(mapping["weight"], wanted)
            and torch.equal(copied["weight"], wanted)
            and copied.keys() == mapping.keys()
            and tensor.requires_grad
            for mapping, tensor, copied, wanted in kept
        )

    assert pool().run(program) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_loop_on_all_ranks_leaves_a_state_that_resumes(kind):
    case = testing.Case(plan=Plan(batches=(6, 4), max_duration="2ep"), problem="linear")

    def program(rank):
        for event, state in case.stream(parallel=kind):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                break
        assert state.module() is not None
        return witness(case.stream(start=state, parallel=kind))[-1], witness(case.stream(parallel=kind))[-1]

    for went_on, whole_run in pool(kind=kind).run(program):
        compare([went_on], [whole_run], kind, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "then", "where"), pairwise(KINDS, KINDS, ["everywhere", "on rank 1"]))
def test_a_state_resumes_after_an_error_in_the_stream_that_it_was_kept_of(kind, then, where, tmp_path):
    case = testing.Case(plan=Plan(batches=(6, 4), max_duration="2ep"), problem="linear", optimizer="adamw")

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
        went_on = witness(case.stream(start=kept, parallel=then))[-1]
        from_disk = witness(case.stream(start=pl.load(path, model=case.model()), parallel=then))[-1]
        return went_on, from_disk, witness(case.stream(parallel=then))[-1]

    for went_on, from_disk, whole_run in pool(kind="replicate").run(program):
        compare([went_on], [whole_run], "went on", 0.0 if kind == then else 1e-6)
        compare([from_disk], [went_on], "from disk", 0.0)


def test_strict_looks_at_the_part_of_this_rank_alone():
    def program(rank):
        case = testing.Case(plan=Plan(batches=(4, 4), max_duration="1ep"))
        case.run(parallel="shard", strict=True, callbacks=[lambda event, state: None])
        return True

    assert pool().run(program) == [True, True]


def test_a_state_in_parts_is_gathered_or_refused():
    case = testing.Case(plan=Plan(batches=(4, 4), max_duration="2ep"))

    def program(rank):
        pairs = case.run(parallel="shard")
        kept = next(state for event, state in pairs if event is Event.BATCH_END)
        with pytest.raises(pl.ResumeError, match="this State is sharded over several ranks"):
            case.run(start=kept, parallel=False)
        return witness(case.stream(start=kept, parallel="replicate"))[-1], witness(pairs[-1:])[0]

    for replicated, sharded in pool().run(program):
        compare([replicated], [sharded], "replicated", 1e-6)
