"""Ranks with fewer batches or samples than the others: they go along, and add nothing."""

from __future__ import annotations

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, witness
from pure_loop.testing.ranks import RankError
from tests.support.worlds import KINDS, an_epoch, pool, samples_seen, two_halves


class _Total(torch.nn.Module):
    """Sums up what it is given in training, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        self.total += x.sum()
        return self.layer(x)


@pytest.mark.slow
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


@pytest.mark.parametrize("uneven", ["stop", "pad"])
def test_ranks_with_unequally_many_batches_of_their_own_end_together(uneven):
    def make(rank):
        return [(torch.full((2, 1), float(10 * rank + i)), torch.zeros(2, 1)) for i in range(3 + 2 * rank)]

    (one, counts), (other, same) = samples_seen(make, 2, data="own", uneven=uneven)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sized", [True, False], ids=["list", "iterator"])
def test_evaluators_with_unequally_many_batches_are_told(kind, sized):
    def program(rank):
        case = testing.Case(plan=Plan(batches=(4,), max_duration="1ba"))
        batches = testing.PROBLEMS["linear"].batches((4,) * (3 - rank), seed=1)
        case.run(parallel=kind, evaluators=batches if sized else iter(batches))

    message = "given 3 batches.*given 2 batches" if kind == "replicate" else "at different events.*EVAL"
    with pytest.raises(RankError, match="'batches': 2.*'batches': 3" if sized else message):
        pool().run(program)


def test_a_padded_rank_takes_no_part_in_what_no_rank_reaches():
    def program(rank):
        data = [(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]
        stream = an_epoch(two_halves(), data, parallel="replicate")
        grads = [state.grads for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        return [[name for name, grad in each.items() if grad is None] for each in grads]

    assert pool().run(program) == [[["two.weight", "two.bias"]] * 2] * 2


def test_a_rank_without_samples_predicts_nothing():
    data = testing.PROBLEMS["linear"].batches((1,), seed=1)

    def program(rank):
        stream = pl.predict(testing.PROBLEMS["linear"].model(0), data, parallel="replicate")
        return [len(state.outputs) for event, state in stream if event is Event.PREDICT_BATCH_END]

    assert pool().run(program) == [[1], [0]]


class _Packs(torch.nn.Module):
    """Gives a packed sequence of one number for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return torch.nn.utils.rnn.pack_sequence(list(self.layer(x)[:, None]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_samples_goes_along_where_outputs_are_a_packed_sequence(kind):
    data = [(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]

    def run(parallel):
        with pl.random.seeded(0):
            model = _Packs()
        options = {"loss": lambda outputs, targets: outputs.data.square().mean(), "parallel": parallel}
        stream = an_epoch(model, data, **options)
        return [float(state.loss) for event, state in stream if event is Event.BATCH_END]

    alone = run(None)
    for losses in pool(kind=kind).run(lambda rank: run(kind)):
        assert losses == pytest.approx(alone, rel=1e-5)
