"""The data of several ranks: every sample is seen exactly once, in training and in evaluation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed.engines import reads_its_own
from pure_loop.testing.ranks import RankError
from tests.support.tiers import tiers
from tests.support.worlds import KINDS, pool, samples_seen


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    tiers(itertools.product(LOADERS, [2, 3]), [*((name, 2) for name in LOADERS), ("iterable", 3)]),
)
def test_every_sample_is_seen_exactly_once(name, ranks):
    make = LOADERS[name]
    n = 12 if name == "list" else 13
    results = samples_seen(lambda rank: make(), ranks)
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

    (one, counts), (other, _) = samples_seen(make, 2)
    for epoch in range(2):
        mine, theirs = ([value for _, values in seen[epoch] for value in values] for seen in (one, other))
        assert len(mine) == len(theirs) == 6
        assert sorted(mine + theirs) == list(map(float, range(12)))
    assert one[0] != one[1]
    assert counts[-1] == 24


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


def test_a_module_is_evaluated_with_the_parameters_of_rank_0():
    data = testing.PROBLEMS["linear"].batches((4,), seed=1)

    def program(rank):
        model = testing.PROBLEMS["linear"].model(rank)
        loss = torch.nn.functional.cross_entropy
        return float(pl.run(pl.evaluate(model, data, loss=loss, parallel="replicate")).metrics["eval"]["loss"])

    one, other = pool().run(program)
    assert one == other


class _Around:
    """A loader of the user's own."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


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


UNEVEN = {
    "padding": lambda n, rank: DataLoader(_table(n), 2, sampler=DistributedSampler(_table(n), 2, rank, shuffle=False)),
    "shuffled": lambda n, rank: DataLoader(_table(n), 2, sampler=DistributedSampler(_table(n), 2, rank)),
    "drop last": lambda n, rank: DataLoader(
        _table(n), 2, sampler=DistributedSampler(_table(n), 2, rank, drop_last=True)
    ),
    "batch sampler": lambda n, rank: DataLoader(
        _table(n), batch_sampler=BatchSampler(DistributedSampler(_table(n), 2, rank), 2, False)
    ),
    "own sampler": lambda n, rank: DataLoader(_table(n), 2, sampler=_Padding(n, 2, rank)),
    "wrapper": lambda n, rank: _Around(UNEVEN["padding"](n, rank)),
    "wrappers": lambda n, rank: _Around({"a": [_Around(UNEVEN["own sampler"](n, rank))]}),
    "factory": lambda n, rank: _Around((lambda loader: lambda: loader)(UNEVEN["drop last"](n, rank))),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", UNEVEN)
def test_a_sampler_that_repeats_or_leaves_out_is_refused_in_evaluation(kind, rank, monkeypatch):
    """On both ranks, before any other is waited for, and only where a sample comes twice or not at all."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    make = UNEVEN[kind]
    for stream in ("eval/val", "predict"):
        assert reads_its_own(pl.distributed.Parallel(), make(8, rank), stream)
        fault = "leaves out 1" if kind in ("drop last", "factory") else "gives 1 of them twice"
        with pytest.raises(pl.ArgumentError, match=rf"the {stream} dataloader's \w+ divides 7 samples .* {fault}"):
            reads_its_own(pl.distributed.Parallel(), make(7, rank), stream)
    assert reads_its_own(pl.distributed.Parallel(), make(7, rank), "train")
    assert reads_its_own(pl.distributed.Parallel(), DataLoader(_table(7), 2, sampler=_Exact(7, 2, rank)), "predict")


def _predicted(loader):
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
            DataLoader(_table(7), batch_size=3, sampler=_Exact(7, 2, rank)),
            _Around(DataLoader(_table(7), batch_size=3, sampler=_Exact(7, 2, rank))),
        ]
        return [_predicted(loader) for loader in loaders]

    for result in pool().run(program):
        assert result == [3.0, 3.5, 3.0, 3.0]

    with pytest.raises(RankError, match="gives 1 of them twice"):
        pool().run(lambda rank: _predicted(UNEVEN["wrapper"](7, rank)))


def test_a_distributed_sampler_in_a_wrapper_is_not_split_again():
    def make(rank):
        return _Around(DataLoader(_table(12), batch_size=2, sampler=DistributedSampler(_table(12), 2, rank)))

    (one, counts), (other, _) = samples_seen(make, 2)
    for epoch in range(2):
        mine, theirs = ([value for _, values in seen[epoch] for value in values] for seen in (one, other))
        assert sorted(mine + theirs) == list(map(float, range(12)))
    assert one[0] != one[1]
    assert counts[-1] == 24
