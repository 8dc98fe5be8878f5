"""Law 8, on real processes with gloo: n ranks on their parts of each batch are one rank on the whole."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.distributed.joint import JointEngine
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.testing import LawViolation, laws
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.world import compare, on_ranks, whole, witness
from pure_loop.testing.ranks import RankError, shared_pool
from tests.conftest import THOROUGH

torch.set_num_threads(1)

KINDS = ("replicate", "shard")
A = pl.algorithms
ALGORITHMS = {
    "label_smoothing": lambda: A.label_smoothing(0.1),
    "ema": lambda: A.ema(half_life="3ba"),
    "sam": lambda: A.sam(rho=0.1),
    "asam": lambda: A.sam(rho=0.5, adaptive=True),
    "clip_norm": lambda: A.gradient_clipping("norm", 0.3),
    "clip_value": lambda: A.gradient_clipping("value", 0.1),
    "clip_adaptive": lambda: A.gradient_clipping("adaptive", 0.05),
    "composed": lambda: pl.compose(A.sam(), A.ema(half_life="3ba"), A.gradient_clipping("norm", 0.3)),
}


def examples(fast, thorough):
    return settings(max_examples=thorough if THOROUGH else fast)


def pool(ranks=2, kind="replicate"):
    # torch's DistributedDataParallel crashes where gloo's collectives are checked, in torch itself.
    return shared_pool(ranks, checked=kind == "shard")


def rank_of_world():
    return st.tuples(st.sampled_from(KINDS), st.sampled_from((2, 2, 3)))


# The law.


@given(testing.cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=["fp32"]), rank_of_world())
@examples(fast=14, thorough=1500)
def test_ranks_are_one_rank(case, chosen):
    kind, ranks = chosen
    alone = witness(whole(case, ranks).stream())
    everybody = on_ranks(case, lambda: (), pl.fit, ranks, kind)
    for rank, seen in enumerate(everybody):
        assert [each.event for each in seen] == expected(whole(case, ranks).plan)
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", 1e-5)


@given(testing.cases(problems="linear", optimizers=["sgd"], precisions=["amp_bf16"]), rank_of_world())
@examples(fast=4, thorough=300)
def test_ranks_are_one_rank_in_bfloat16(case, chosen):
    kind, ranks = chosen
    # The sums of a gradient are rounded to 8 bits, here and there in another place, and steps add up.
    case = attrs.evolve(case, plan=attrs.evolve(case.plan, max_duration="2ba"))
    alone = witness(whole(case, ranks).stream())
    for rank, seen in enumerate(on_ranks(case, lambda: (), pl.fit, ranks, kind)):
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", 2e-2)


@given(testing.cases(problems="exact", optimizers=["sgd"], precisions=["fp32"], clip_grads=[None]), rank_of_world())
@examples(fast=5, thorough=500)
def test_gradients_are_bitwise_those_of_one_rank_where_sums_are_exact(case, chosen):
    kind, ranks = chosen

    def gradients(case, **more):
        still = pl.optim.sgd(lr=0.0)
        stream = case.stream(optimizer=still, **more)
        return [each.values["grads"] for each in witness(stream) if each.event is Event.AFTER_TRAIN_BATCH]

    alone = gradients(whole(case, ranks))
    for found in pool(ranks, kind).run(lambda rank: gradients(case, parallel=Parallel(kind=kind))):
        assert len(found) == len(alone)
        for one, other in zip(found, alone, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@given(testing.cases(), rank_of_world())
@examples(fast=5, thorough=500)
def test_all_ranks_yield_the_same_events_counts_and_values(case, chosen):
    kind, ranks = chosen

    def program(rank):
        return witness(case.stream(parallel=kind), counts_time=True)

    first, *others = pool(ranks, kind).run(program)
    assert [each.event for each in first] == expected(whole(case, ranks).plan)
    for other in others:
        compare(other, first, f"{kind}: a rank of {ranks}", 0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_of_the_library_keep_the_law(name):
    laws.world_size(ALGORITHMS[name], max_examples=60 if THOROUGH else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_blurpool_agrees_on_all_ranks(kind):
    # Its models have BatchNorm, of which every rank sees another batch, so the law has no equality to ask for.
    case = testing.Case(plan=Plan(batches=(5, 4), max_duration="4ba"), problem="convolution")

    def program(rank):
        return witness(case.stream([A.blurpool()], parallel=kind))

    first, other = pool(kind=kind).run(program)
    compare(other, first, f"{kind}: rank 1", 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "partition", "from_torch"])
def test_optimizers_step_as_on_one_rank(kind, optimizer):
    def make():
        return {
            "adamw": lambda: pl.optim.adamw(lr=0.05, amsgrad=True),
            "partition": lambda: pl.optim.partition(
                {"matrices": pl.optim.adamw(lr=0.05), "vectors": pl.optim.sgd(lr=0.1, momentum=0.5)},
                lambda name, tensor: "matrices" if tensor.ndim > 1 else "vectors",
            ),
            "from_torch": lambda: pl.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.3),
        }[optimizer]()

    case = testing.Case(plan=Plan(batches=(7, 4), max_duration="5ba", microbatch_size=2), problem="tied")
    alone = witness(whole(case, 2).stream(optimizer=make()))
    for seen in pool(kind=kind).run(lambda rank: witness(case.stream(optimizer=make(), parallel=kind))):
        compare(seen, alone, kind, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_is_the_same_on_all_ranks_and_backs_off_together(kind):
    # One sample overflows, and stands on one rank only.
    data = [(torch.ones(4, 3), torch.zeros(4, 1)) for _ in range(3)]
    data[1][0][3] = 6e4

    def program(rank):
        torch.manual_seed(0)
        stream = pl.fit(
            torch.nn.Linear(3, 1),
            data,
            loss=lambda outputs, targets: (outputs - targets).square().mean(),
            optimizer=pl.optim.sgd(lr=1e-3),
            max_duration="3ba",
            precision="amp_fp16",
            nonfinite="skip",
            parallel=kind,
        )
        return [
            (float(state.loss_scale), int(state.skipped), state.timestamp.sample)
            for event, state in stream
            if event is Event.BATCH_END
        ]

    one, other = pool(kind=kind).run(program)
    assert one == other
    assert one[-1][1] >= 1
    assert one[1][0] < one[0][0]


# Every law can fail.


def _weighs_ranks_alike():
    """Each rank's gradient is a mean over its own samples, and the mean over ranks weighs them alike."""
    real = JointEngine.divisor

    def divisor(self, weights):
        real(self, weights)
        mine = self._weights[self.rank] or 1
        return mine * self.ranks / self._power

    return patch.object(JointEngine, "divisor", divisor)


def _keeps_its_own_loss():
    return patch.object(JointEngine, "settle", lambda self, state, loss: loss)


def _counts_its_own_samples():
    def counts(self, samples, tokens, seconds):
        return samples, tokens, seconds()

    return patch.object(JointEngine, "counts", counts)


def _measures_its_own_part():
    return patch.object(JointEngine, "measured", lambda self, metrics, accumulated, state: accumulated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong", [_weighs_ranks_alike, _keeps_its_own_loss, _counts_its_own_samples, _measures_its_own_part]
)
def test_a_wrong_engine_fails_the_law(wrong, kind):
    plan = Plan(batches=(5, 3), max_duration="3ba", evaluators={"val": EvaluatorPlan((3,), interval="1ba")})
    case = testing.Case(plan=plan)

    def fit(*arguments, **options):
        with wrong() if options.get("parallel") is not None else patch.object(pl, "__version__", "0"):
            yield from pl.fit(*arguments, **options)

    alone = witness(whole(case, 2).stream())
    everybody = on_ranks(case, lambda: (), fit, 2, kind)

    def hold():
        for seen in everybody:
            compare(seen, alone, kind, 1e-5)

    with pytest.raises(LawViolation):
        hold()


def test_an_algorithm_that_counts_its_own_samples_fails_the_law():
    def make():
        @pl.algorithm(Event.AFTER_TRAIN_BATCH)
        def by_size(state):
            n = len(state.batch[0])
            return state.replace(grads={name: g * n for name, g in state.grads.items()})

        return by_size

    with pytest.raises(LawViolation, match="came to something else than one rank alone"):
        laws.world_size(make)


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


def test_dropout_differs_between_ranks_and_shuffling_does_not():
    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, dtype=torch.int64))

    def program(rank):
        seen, masks = [], []
        for event, state in pl.fit(
            torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.5)),
            DataLoader(data, batch_size=6, shuffle=True),
            loss=torch.nn.functional.cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="2ep",
            parallel="replicate",
        ):
            if event is Event.AFTER_DATALOADER:
                seen.append(state.batch[0].flatten().tolist())
            if event is Event.AFTER_FORWARD:
                masks.append(state.outputs.detach())
        return seen, [mask != 0 for mask in masks]

    (one, kept), (other, others) = pool().run(program)
    assert not all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))
    for epoch in range(2):
        batches = [one[epoch * 2 + i] + other[epoch * 2 + i] for i in range(2)]
        assert sorted(itertools.chain(*batches)) == list(map(float, range(12)))
    assert one[:2] != one[2:]
    # The same order as one rank has.
    alone = [
        state.batch[0].flatten().tolist()
        for event, state in pl.fit(
            torch.nn.Linear(1, 2),
            DataLoader(data, batch_size=6, shuffle=True),
            loss=torch.nn.functional.cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="2ep",
        )
        if event is Event.AFTER_DATALOADER
    ]
    assert [a + b for a, b in zip(one, other, strict=True)] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_are_the_mean_over_ranks(kind):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(7, 3, generator=generator)

    def program(rank):
        torch.manual_seed(0)
        stream = pl.fit(
            torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=1.0), torch.nn.Linear(3, 1)),
            [(inputs, torch.zeros(7, 1))],
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            parallel=kind,
        )
        return dict(pl.run(stream).buffers)

    for buffers in pool(kind=kind).run(program):
        torch.testing.assert_close(buffers["0.running_mean"], inputs.mean(0))
        assert buffers["0.num_batches_tracked"].item() == 1


class _Total(torch.nn.Module):
    """Sums up what it is given in training, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        self.total += x.sum()
        return self.layer(x)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_no_trace_in_buffers(kind):
    # Two microbatches for the first rank; the second one has one sample, and goes through it again for nothing.
    inputs = torch.tensor([[1.0], [10.0], [100.0]])

    def program(rank):
        stream = pl.fit(
            _Total(),
            [(inputs, torch.zeros(3, 1))],
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            microbatch_size=1,
            parallel=kind,
        )
        pairs = list(stream)
        return sum(event is Event.AFTER_FORWARD for event, _ in pairs), float(pairs[-1][1].buffers["total"])

    # Averaged over ranks by their samples.
    assert pool(kind=kind).run(program) == [(2, pytest.approx((2 * 11 + 100) / 3))] * 2


# Data.


def _samples_seen(make_loader, ranks, epochs=2, **options):
    """For every epoch, the samples that all ranks saw and counted."""

    def program(rank):
        seen = [[] for _ in range(epochs)]
        counts = []
        stream = pl.fit(
            torch.nn.Linear(1, 1),
            make_loader(rank),
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.0),
            max_duration=f"{epochs}ep",
            parallel=Parallel(**options),
        )
        for event, state in stream:
            if event is Event.AFTER_BACKWARD:
                t = state.timestamp
                seen[t.epoch].append((t.batch, state.microbatch[0].flatten().tolist()))
            if event is Event.BATCH_END:
                counts.append(state.timestamp.sample)
        return seen, counts

    return pool(ranks).run(program)


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.zeros(1)) for i in range(self.n))


def _table(n):
    return TensorDataset(torch.arange(float(n)).reshape(n, 1), torch.zeros(n, 1))


LOADERS = {
    "table": lambda: DataLoader(_table(13), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(_table(13), batch_size=4, shuffle=True, num_workers=1),
    "persistent": lambda: DataLoader(_table(13), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True),
    "collate": lambda: DataLoader(_table(13), batch_size=4, collate_fn=torch.utils.data.default_collate, shuffle=True),
    "list": lambda: [(torch.arange(float(i), i + 4).reshape(4, 1), torch.zeros(4, 1)) for i in range(0, 12, 4)],
    "iterable": lambda: DataLoader(_Stream(13), batch_size=4),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_seen_exactly_once(name, ranks):
    make = LOADERS[name]
    n = 12 if name == "list" else 13
    results = _samples_seen(lambda rank: make(), ranks)
    for epoch in range(2):
        together = {}
        for seen, _ in results:
            for batch, values in seen[epoch]:
                together.setdefault(batch, []).append(values)
        found = []
        for batch, parts in together.items():
            size = 4 if batch % (-(-n // 4)) < n // 4 else n % 4
            counted = [value for part in parts for value in part][:size]
            found += counted
        assert sorted(found) == list(map(float, range(n)))
    assert all(counts == results[0][1] for _, counts in results)
    assert results[0][1][-1] == 2 * n


def test_a_distributed_sampler_is_not_split_again():
    def make(rank):
        data = _table(12)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=True))

    (one, counts), (other, _) = _samples_seen(make, 2)
    for epoch in range(2):
        mine, theirs = ([value for _, values in seen[epoch] for value in values] for seen in (one, other))
        assert len(mine) == len(theirs) == 6
        assert sorted(mine + theirs) == list(map(float, range(12)))
    assert one[0] != one[1]
    assert counts[-1] == 24


@pytest.mark.parametrize("uneven", ["stop", "pad"])
def test_ranks_with_unequally_many_batches_of_their_own_end_together(uneven):
    def make(rank):
        return [(torch.full((2, 1), float(10 * rank + i)), torch.zeros(2, 1)) for i in range(3 + 2 * rank)]

    (one, counts), (other, same) = _samples_seen(make, 2, data="own", uneven=uneven)
    assert counts == same
    batches = 3 if uneven == "stop" else 5
    assert len(one[0]) == len(other[0]) == batches
    assert counts[batches - 1] == (12 if uneven == "stop" else 16)


def test_a_padded_rank_adds_nothing():
    """Its batches go through the loop and through gradients with weight 0."""

    def program(rank):
        torch.manual_seed(0)
        data = [(torch.full((2, 1), 1.0 + i), torch.zeros(2, 1)) for i in range(1 + 2 * rank)]
        stream = pl.fit(
            torch.nn.Linear(1, 1),
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.01),
            max_duration="1ep",
            parallel=Parallel(data="own", uneven="pad"),
        )
        pairs = list(stream)
        grads = [dict(state.grads) for event, state in pairs if event is Event.AFTER_TRAIN_BATCH]
        return grads, dict(pairs[-1][1].params)

    (one, params), (other, _) = pool().run(program)
    torch.manual_seed(0)
    batches = [
        (torch.ones(4, 1), torch.zeros(4, 1)),
        *[(torch.full((2, 1), 1.0 + i), torch.zeros(2, 1)) for i in (1, 2)],
    ]
    alone = pl.run(
        pl.fit(
            torch.nn.Linear(1, 1),
            batches,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.01),
            max_duration="1ep",
        )
    )
    assert len(one) == len(other) == 3
    for name, tensor in alone.params.items():
        torch.testing.assert_close(params[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_prediction_by_themselves(kind):
    batches = testing.PROBLEMS["linear"].batches((5, 3, 1), seed=3)

    def program(rank):
        model = testing.PROBLEMS["linear"].model(0)
        loss = torch.nn.functional.cross_entropy
        evaluated = pl.run(pl.evaluate(model, {"test": batches}, loss=loss, parallel=kind))
        predicted = [
            state.outputs
            for event, state in pl.predict(model, batches, parallel=kind)
            if event is Event.PREDICT_BATCH_END
        ]
        return dict(evaluated.metrics["test"]), predicted

    (one, outputs), (other, others) = pool(kind=kind).run(program)
    model = testing.PROBLEMS["linear"].model(0)
    alone = pl.run(pl.evaluate(model, {"test": batches}, loss=torch.nn.functional.cross_entropy)).metrics["test"]
    for found in (one, other):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)
    for mine, theirs, (inputs, _) in zip(outputs, others, batches, strict=True):
        torch.testing.assert_close(torch.cat([mine, theirs])[: len(inputs)], model(inputs))


def test_a_metric_without_merge_says_what_it_needs():
    worst = pl.Metric(
        "worst",
        lambda: torch.tensor(0.0),
        lambda found, outputs, batch: torch.maximum(found, outputs.abs().max()),
        lambda found: found,
    )
    batches = testing.PROBLEMS["linear"].batches((4,), seed=3)

    def program(rank):
        model = testing.PROBLEMS["linear"].model(0)
        return pl.run(
            pl.evaluate(
                model,
                {"test": pl.Evaluator(batches, metrics=worst)},
                loss=torch.nn.functional.cross_entropy,
                parallel="replicate",
            )
        )

    with pytest.raises(RankError, match=r"metric 'worst' .* can't be put together: give it pl\.Metric"):
        pool().run(program)


# Going on.


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_replicated_state_goes_on_sharded():
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
        kept = next(state for event, state in case.stream() if event is Event.BATCH_END)
        if rank == 1:
            kept = kept.replace(params={name: tensor + 1 for name, tensor in kept.params.items()})
        case.run(start=kept, parallel="replicate")

    with pytest.raises(RankError, match=r"rank 1 of 2 goes on from another State than rank 0.*params\['weight'\]"):
        pool().run(program)


# Observers.


def test_rank_0_alone_logs_unless_a_callback_asks_for_all(capsys):
    def program(rank):
        class Everywhere(pl.Callback):
            all_ranks = True

            def __init__(self):
                self.calls = 0

            def batch_end(self, state, logger):
                self.calls += 1

        class Once(pl.Callback):
            calls = 0

            def batch_end(self, state, logger):
                self.calls += 1

        everywhere, once, memory = Everywhere(), Once(), pl.loggers.InMemoryLogger()
        case = testing.Case(plan=Plan(batches=(4,), max_duration="2ba"))
        case.run(parallel="replicate", callbacks=[everywhere, once], loggers=[memory])
        return everywhere.calls, once.calls, sorted(memory.metrics)

    one, other = pool().run(program)
    assert one[:2] == (2, 2)
    assert other[:2] == (2, 0)
    assert "train/loss" in one[2]
    assert other[2] == []


def test_progress_draws_on_rank_0_alone():
    import io

    def program(rank):
        screen = io.StringIO()
        case = testing.Case(plan=Plan(batches=(4,), max_duration="2ba"))
        pl.run(pl.progress(case.stream(parallel="replicate"), file=screen))
        return screen.getvalue()

    one, other = pool().run(program)
    assert "done" in one
    assert other == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_leaves_no_process_group_of_its_own(kind):
    case = testing.Case(plan=Plan(batches=(4, 4), max_duration="1ep"))

    def program(rank):
        case.run(parallel=kind)  # sharded, the first one leaves a mesh for the States that it made
        before = set(c10d._world.pg_map)
        case.run(parallel=kind)
        after_end = set(c10d._world.pg_map)
        for event, _ in case.stream(parallel=kind):
            if event is Event.BATCH_END:
                break
        return before == after_end, set(c10d._world.pg_map) == before

    assert pool(kind=kind).run(program) == [(True, True), (True, True)]


# One rank.


def test_without_torchrun_there_is_one_rank():
    case = testing.Case(plan=Plan(batches=(4, 3), max_duration="1ep"))
    for kind in KINDS:
        alone, same = witness(case.stream()), witness(case.stream(parallel=kind))
        compare(same, alone, kind, 0.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ddp", 'parallel=\'ddp\': write "replicate", "shard"'),
        (2, "parallel=2 of type int"),
    ],
)
def test_what_parallel_can_be(given, message):
    case = testing.Case(plan=Plan(batches=(4,), max_duration="1ba"))
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=message):
        case.stream(parallel=given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "ddp"},
        {"data": "mine"},
        {"uneven": 1},
        {"timeout": "3ep"},
        {"timeout": 0},
        {"timeout": "soon"},
        {"find_unused_parameters": 1},
        {"bucket_cap_mb": -1},
        {"groups": 3},
        {"mesh": 3},
    ],
    ids=str,
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=next(iter(wrong))):
        Parallel(**wrong)


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_on_weights_has_its_gradient_on_several_ranks(kind):
    @pl.algorithm(Event.AFTER_LOSS)
    def penalty(state):
        return state.replace(loss=state.loss + 0.3 * sum(tensor.square().sum() for tensor in state.params.values()))

    plan = Plan(batches=(5, 4), max_duration="2ep", microbatch_size=2)
    case = testing.Case(plan=plan, problem="tied")
    alone = witness(whole(case, 2).stream([penalty]))
    for seen in pool(kind=kind).run(lambda rank: witness(case.stream([penalty], parallel=kind))):
        compare(seen, alone, kind, 1e-5)


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


# What a review found.


def _two_halves():
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def forward(self, x):
            out = 0.0 * x
            if bool((x > 0).any()):
                out = out + (x > 0) * self.one(x)
            if bool((x < 0).any()):
                out = out + (x < 0) * self.two(x)
            return out

    torch.manual_seed(0)
    return Halves()


def _halves_run(parallel, size):
    # Each rank's share of the first batch reaches both halves at once; in the others, its last microbatch one of them.
    batches = [torch.tensor([[x] for x in row]) for row in ((-1.0, 1.0, -2.0, 2.0), (1.0, -1.0, 2.0, -3.0))]
    stream = pl.fit(
        _two_halves(),
        [(batch, torch.zeros(4, 1)) for batch in batches],
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        microbatch_size=size,
        parallel=parallel,
    )
    return dict(pl.run(stream).params)


def test_a_last_microbatch_that_leaves_a_parameter_out_still_exchanges_it():
    alone = _halves_run(None, 2)
    for found in pool().run(lambda rank: _halves_run(Parallel(find_unused_parameters=False), 1)):
        for name in alone:
            torch.testing.assert_close(found[name], alone[name])


def test_sharded_ranks_that_reach_other_parameters_are_told():
    def program(rank):
        data = [(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.zeros(4, 1))] * 2
        pl.run(
            pl.fit(
                _two_halves(),
                data,
                loss=torch.nn.functional.mse_loss,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="1ep",
                parallel="shard",
            )
        )

    with pytest.raises(RankError, match="reached other parameters on one rank than on another"):
        pool().run(program)


@pytest.mark.parametrize("kind", KINDS)
def test_an_autocast_around_the_loop_changes_nothing(kind):
    case = testing.Case(plan=Plan(batches=(6, 4), max_duration="4ep"), problem="linear", precision="amp_bf16")

    def program(rank):
        plain = witness(case.stream(parallel=kind))
        with torch.autocast("cpu", enabled=False):
            return witness(case.stream(parallel=kind)), plain

    for inside, plain in pool(kind=kind).run(program):
        compare(inside, plain, kind, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_loop_on_all_ranks_leaves_a_state_that_goes_on(kind):
    case = testing.Case(plan=Plan(batches=(6, 4), max_duration="2ep"), problem="linear")

    def program(rank):
        for event, state in case.stream(parallel=kind):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                break
        assert state.module() is not None
        return witness(case.stream(start=state, parallel=kind))[-1], witness(case.stream(parallel=kind))[-1]

    for went_on, whole_run in pool(kind=kind).run(program):
        compare([went_on], [whole_run], kind, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_parts_and_a_rank_without_samples(kind):
    inputs = testing.PROBLEMS["linear"].batches((3, 1), seed=1)

    def loss(outputs, targets):
        value = torch.nn.functional.cross_entropy(outputs, targets)
        return {"total": value, "half": value / 2, "constant": 1.0}

    def run(parallel):
        model = testing.PROBLEMS["linear"].model(0)
        stream = pl.fit(model, inputs, loss=loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", parallel=parallel)
        return [
            {name: float(value) for name, value in state.loss.items()}
            for event, state in stream
            if event is Event.BATCH_END
        ]

    alone = run(None)
    for found in pool(kind=kind).run(lambda rank: run(kind)):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_padding_survives_evaluations_and_going_on():
    def program(rank):
        data = [(torch.full((2, 1), 1.0 + i), torch.zeros(2, 1)) for i in range(2 + 2 * rank)]

        def stream(start):
            torch.manual_seed(0)
            return pl.fit(
                torch.nn.Linear(1, 1) if start is None else start,
                data,
                loss=torch.nn.functional.mse_loss,
                optimizer=pl.optim.sgd(lr=0.01),
                max_duration="2ep",
                evaluators=data[:1],
                eval_interval="1ba",
                parallel=Parallel(data="own", uneven="pad"),
            )

        pairs = list(stream(None))
        kept = next(state for event, state in pairs if event is Event.BATCH_END and state.timestamp.batch == 3)
        return witness(pairs[-1:]), witness(list(stream(kept))[-1:])

    for first, again in pool().run(program):
        compare(again, first, "going on", 0.0)
        assert first[0].counts[1] == 8


def test_strict_looks_at_the_part_of_this_rank_alone():
    def program(rank):
        case = testing.Case(plan=Plan(batches=(4, 4), max_duration="1ep"))
        case.run(parallel="shard", strict=True, callbacks=[lambda event, state: None])
        return True

    assert pool().run(program) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluators_with_unequally_many_batches_are_told(kind):
    def program(rank):
        case = testing.Case(plan=Plan(batches=(4,), max_duration="1ba"))
        case.run(parallel=kind, evaluators=testing.PROBLEMS["linear"].batches((4,) * (3 - rank), seed=1))

    message = "after 3 batches.*after 2 batches" if kind == "replicate" else "lost step.*EVAL"
    with pytest.raises(RankError, match=message):
        pool().run(program)


def test_a_padded_rank_takes_no_part_in_what_nobody_reaches():
    def program(rank):
        data = [(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]
        stream = pl.fit(
            _two_halves(),
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            parallel="replicate",
        )
        grads = [state.grads for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        return [[name for name, grad in each.items() if grad is None] for each in grads]

    assert pool().run(program) == [[["two.weight", "two.bias"]] * 2] * 2


def test_a_state_in_parts_is_gathered_or_refused():
    case = testing.Case(plan=Plan(batches=(4, 4), max_duration="2ep"))

    def program(rank):
        pairs = case.run(parallel="shard")
        kept = next(state for event, state in pairs if event is Event.BATCH_END)
        with pytest.raises(pl.ResumeError, match="this State is in parts"):
            case.run(start=kept)
        return witness(case.stream(start=kept, parallel="replicate"))[-1], witness(pairs[-1:])[0]

    for replicated, sharded in pool().run(program):
        compare([replicated], [sharded], "replicated", 1e-6)


def test_a_module_is_evaluated_with_the_parameters_of_rank_0():
    data = testing.PROBLEMS["linear"].batches((4,), seed=1)

    def program(rank):
        model = testing.PROBLEMS["linear"].model(rank)
        loss = torch.nn.functional.cross_entropy
        return float(pl.run(pl.evaluate(model, data, loss=loss, parallel="replicate")).metrics["eval"]["loss"])

    one, other = pool().run(program)
    assert one == other


def test_a_rank_without_samples_predicts_nothing():
    data = testing.PROBLEMS["linear"].batches((1,), seed=1)

    def program(rank):
        stream = pl.predict(testing.PROBLEMS["linear"].model(0), data, parallel="replicate")
        return [len(state.outputs) for event, state in stream if event is Event.PREDICT_BATCH_END]

    assert pool().run(program) == [[1], [0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "replicate", "groups": lambda name, module: True},
        {"kind": "shard", "bucket_cap_mb": 1.0},
        {"kind": "shard", "find_unused_parameters": True},
    ],
    ids=["groups", "bucket_cap_mb", "find_unused_parameters"],
)
def test_settings_of_the_other_kind_are_refused(wrong):
    with pytest.raises(pl.ArgumentError, match="has no use for"):
        Parallel(**wrong)


class _Late(torch.nn.Module):
    """Writes to its buffer from the third forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(1))
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        if self.training:
            self.steps += 1
            if self.steps > 2:
                self.mean += x.mean()
        return self.layer(x)


def test_buffers_that_are_written_to_late_agree_as_well():
    data = [(torch.tensor([[1.0], [3.0]]) * (1 + i), torch.zeros(2, 1)) for i in range(4)]

    def program(rank):
        stream = pl.fit(
            _Late(),
            data,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            parallel="replicate",
        )
        return dict(pl.run(stream).buffers)

    # The means over the third and the fourth batch.
    for buffers in pool().run(program):
        assert buffers["steps"] == 4
        assert buffers["mean"] == pytest.approx(6.0 + 8.0)
