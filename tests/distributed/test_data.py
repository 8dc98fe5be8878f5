"""The data of several ranks: every sample counts exactly once; ranks with fewer go along, and add nothing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.distributed.engines import reads_its_own
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, witness
from pure_loop.testing.ranks import RankError
from tests.support.tiers import tiers
from tests.support.worlds import KINDS, an_epoch, pool, samples_seen, two_halves

LINEAR = testing.PROBLEMS["linear"]
cross_entropy = torch.nn.functional.cross_entropy


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.zeros(1)) for i in range(self.n))


def _table(n):
    return TensorDataset(torch.arange(float(n)).reshape(n, 1), torch.zeros(n, 1))


LOADERS = {
    "table": lambda: DataLoader(_table(13), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(_table(13), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True),
    "collate": lambda: DataLoader(_table(13), batch_size=4, collate_fn=torch.utils.data.default_collate, shuffle=True),
    "list": lambda: [(torch.arange(float(i), i + 4).reshape(4, 1), torch.zeros(4, 1)) for i in range(0, 12, 4)],
    "iterable": lambda: DataLoader(_Stream(13), batch_size=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", tiers([2, 3], [3]))
def test_every_sample_is_seen_exactly_once(ranks):
    """Slow: a loader with workers on each rank."""
    for name, make in LOADERS.items():
        n = 12 if name == "list" else 13
        results = samples_seen(lambda rank, make=make: make(), ranks)
        for epoch in range(2):
            together = {}
            for seen, _ in results:
                for batch, values in seen[epoch]:
                    together.setdefault(batch, []).append(values)
            found = []
            for batch, parts in together.items():
                size = 4 if batch % (-(-n // 4)) < n // 4 else n % 4
                found += [value for part in parts for value in part][:size]
            assert sorted(found) == list(map(float, range(n))), name
        assert all(counts == results[0][1] for _, counts in results)
        assert results[0][1][-1] == 2 * n


class _Around:
    """A loader of the user's own."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def test_a_distributed_sampler_is_not_split_again():
    """In a wrapper neither."""
    for wrapped in (False, True):

        def make(rank, wrapped=wrapped):
            loader = DataLoader(_table(12), batch_size=2, sampler=DistributedSampler(_table(12), 2, rank))
            return _Around(loader) if wrapped else loader

        (one, counts), (other, _) = samples_seen(make, 2)
        for epoch in range(2):
            mine, theirs = ([value for _, values in seen[epoch] for value in values] for seen in (one, other))
            assert len(mine) == len(theirs) == 6
            assert sorted(mine + theirs) == list(map(float, range(12)))
        assert one[0] != one[1]
        assert counts[-1] == 24


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_prediction_by_themselves(kind):
    """With a batch of one sample, of which a rank has none; of a module, the parameters of rank 0 count."""
    batches = LINEAR.batches((5, 3, 1), seed=3)

    def program(rank):
        model = LINEAR.model(rank)
        evaluated = pl.run(pl.evaluate(model, {"test": batches}, loss=cross_entropy, parallel=kind))
        stream = pl.predict(model, batches, parallel=kind)
        predicted = [state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END]
        return dict(evaluated.metrics["test"]), predicted

    (one, outputs), (other, others) = pool(kind=kind).run(program)
    model = LINEAR.model(0)
    alone = pl.run(pl.evaluate(model, {"test": batches}, loss=cross_entropy)).metrics["test"]
    for found in (one, other):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)
    for mine, theirs, (inputs, _) in zip(outputs, others, batches, strict=True):
        torch.testing.assert_close(torch.cat([mine, theirs])[: len(inputs)], model(inputs))
    assert len(others[-1]) == 0


def test_a_metric_without_merge_says_what_it_needs():
    worst = pl.Metric(
        "worst",
        lambda: torch.tensor(0.0),
        lambda found, outputs, batch: torch.maximum(found, outputs.abs().max()),
        lambda found: found,
    )
    evaluators = {"test": pl.Evaluator(LINEAR.batches((4,), seed=3), metrics=worst)}
    with pytest.raises(RankError, match=r"metric 'worst' .* can't be put together: give it pl\.Metric"):
        pool().run(lambda rank: pl.run(pl.evaluate(LINEAR.model(0), evaluators, parallel="replicate")))


class _Padding(torch.utils.data.Sampler):
    """Begins anew until each rank has as many samples; is no DistributedSampler."""

    def __init__(self, n, num_replicas, rank):
        self.n, self.num_replicas, self.rank = n, num_replicas, rank

    def __iter__(self):
        size = -(-self.n // self.num_replicas) * self.num_replicas
        return iter([index % self.n for index in range(self.rank, size, self.num_replicas)])


class _Exact(_Padding):
    def __iter__(self):
        return iter(range(self.rank, self.n, self.num_replicas))

    def __len__(self):
        return len(range(self.rank, self.n, self.num_replicas))


def _sampled(n, rank, **options):
    return DataLoader(_table(n), 2, sampler=DistributedSampler(_table(n), 2, rank, **options))


UNEVEN = {
    "padding": lambda n, rank: _sampled(n, rank, shuffle=False),
    "shuffled": lambda n, rank: _sampled(n, rank),
    "drop last": lambda n, rank: _sampled(n, rank, drop_last=True),
    "batch sampler": lambda n, rank: DataLoader(
        _table(n), batch_sampler=BatchSampler(DistributedSampler(_table(n), 2, rank), 2, False)
    ),
    "own sampler": lambda n, rank: DataLoader(_table(n), 2, sampler=_Padding(n, 2, rank)),
    "wrappers": lambda n, rank: _Around({"a": [_Around(UNEVEN["own sampler"](n, rank))]}),
    "factory": lambda n, rank: _Around((lambda loader: lambda: loader)(UNEVEN["drop last"](n, rank))),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampler_that_repeats_or_leaves_out_is_refused_in_evaluation(rank, monkeypatch):
    """On both ranks, before any other is waited for, and only where a sample comes twice or not at all."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    for kind, make in UNEVEN.items():
        for stream in ("eval/val", "predict"):
            assert reads_its_own(Parallel(), make(8, rank), stream)
            fault = "leaves out 1" if kind in ("drop last", "factory") else "gives 1 of them twice"
            says = rf"the {stream} dataloader's \w+ divides 7 samples .* {fault}"
            with pytest.raises(pl.ArgumentError, match=says):
                reads_its_own(Parallel(), make(7, rank), stream)
        assert reads_its_own(Parallel(), make(7, rank), "train")
    assert reads_its_own(Parallel(), DataLoader(_table(7), 2, sampler=_Exact(7, 2, rank)), "predict")


def _mean(loader):
    """The mean of 0 .. n - 1 where each sample counts once."""
    identity = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        identity.weight.fill_(1.0)
    mean = pl.metrics.mean(lambda outputs, batch: outputs.flatten(), "mean")
    evaluators = {"val": pl.Evaluator(loader, metrics=mean)}
    return float(pl.run(pl.evaluate(identity, evaluators, parallel="replicate")).metrics["val"]["mean"])


def test_each_sample_counts_once_in_evaluation():
    """Without a sampler, with a DistributedSampler that divides evenly, with one of one's own that does not pad."""

    def program(rank):
        loaders = [
            DataLoader(_table(7), batch_size=3),
            DataLoader(_table(8), batch_size=3, sampler=DistributedSampler(_table(8), 2, rank)),
            _Around(DataLoader(_table(7), batch_size=3, sampler=_Exact(7, 2, rank))),
        ]
        return [_mean(loader) for loader in loaders]

    assert pool().run(program) == [[3.0, 3.5, 3.0]] * 2
    with pytest.raises(RankError, match="gives 1 of them twice"):
        pool().run(lambda rank: _mean(_Around(UNEVEN["padding"](7, rank))))


# Ranks with fewer batches or samples than the others.


class _Total(torch.nn.Linear):
    """Sums up what it is given in training, in a buffer."""

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += x.sum()
        return super().forward(x)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_no_trace_in_buffers(kind):
    # Two microbatches for the first rank; the second one has one sample, and goes through it again for nothing.
    inputs = torch.tensor([[1.0], [10.0], [100.0]])

    def program(rank):
        pairs = list(an_epoch(_Total(), [(inputs, torch.zeros(3, 1))], microbatch_size=1, parallel=kind))
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


def test_a_padded_rank_adds_nothing_through_evaluations_and_going_on():
    """Its batches go through the loop and through gradients with weight 0."""
    parallel = Parallel(data="own", uneven="pad")

    def stream(data, start=None, **options):
        torch.manual_seed(0)
        return an_epoch(torch.nn.Linear(1, 1) if start is None else start, data, max_duration="2ep", **options)

    def program(rank):
        data = [(torch.full((2, 1), 1.0 + i), torch.zeros(2, 1)) for i in range(1 + 2 * rank)]
        options = {"evaluators": data[:1], "eval_interval": "1ba", "parallel": parallel}
        pairs = list(stream(data, **options))
        kept = next(state for event, state in pairs if event is Event.BATCH_END and state.timestamp.batch == 2)
        return witness(pairs[-1:]), witness(list(stream(data, kept, **options))[-1:]), dict(pairs[-1][1].params)

    whole = [torch.full((4 if i == 0 else 2, 1), 1.0 + i) for i in range(3)]
    alone = pl.run(stream([(inputs, torch.zeros(len(inputs), 1)) for inputs in whole]))
    for first, again, params in pool().run(program):
        compare(again, first, "going on", 0.0)
        assert first[0].counts[1] == 6
        for name, tensor in alone.params.items():
            torch.testing.assert_close(params[name], tensor)


class _Packs(torch.nn.Linear):
    """Gives a packed sequence of one number for each sample."""

    def forward(self, x):
        return torch.nn.utils.rnn.pack_sequence(list(super().forward(x)[:, None]))


def _packed(outputs, targets):
    return outputs.data.square().mean()


def _in_parts(outputs, targets):
    value = torch.nn.functional.mse_loss(outputs, targets)
    return {"total": value, "half": value / 2, "constant": 1.0}


@pytest.mark.parametrize(("model", "loss"), [(torch.nn.Linear, _in_parts), (_Packs, _packed)], ids=["parts", "packed"])
def test_a_rank_without_samples_goes_along(model, loss):
    """Where the loss is in parts, or outputs are a packed sequence."""
    data = [(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]

    def run(parallel):
        torch.manual_seed(0)
        stream = an_epoch(model(1, 1), data, loss=loss, parallel=parallel)
        losses = [state.loss for event, state in stream if event is Event.BATCH_END]
        return [float(each) for loss in losses for each in (loss.values() if isinstance(loss, dict) else [loss])]

    alone = run(None)
    for kind in KINDS:
        for losses in pool(kind=kind).run(lambda rank, kind=kind: run(kind)):
            assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluators_with_unequally_many_batches_are_told(kind):
    other = "given 3 batches.*given 2 batches" if kind == "replicate" else "at different events.*EVAL"
    for given, message in ((list, "'batches': 2.*'batches': 3"), (iter, other)):

        def program(rank, given=given):
            case = testing.Case(plan=Plan(batches=(4,), max_duration="1ba"))
            case.run(parallel=kind, evaluators=given(LINEAR.batches((4,) * (3 - rank), seed=1)))

        with pytest.raises(RankError, match=message):
            pool().run(program)


def test_a_padded_rank_takes_no_part_in_what_no_rank_reaches():
    def program(rank):
        data = [(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]
        stream = an_epoch(two_halves(), data, parallel="replicate")
        grads = [state.grads for event, state in stream if event is Event.AFTER_TRAIN_BATCH]
        return [[name for name, grad in each.items() if grad is None] for each in grads]

    assert pool().run(program) == [[["two.weight", "two.bias"]] * 2] * 2
