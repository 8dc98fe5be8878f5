"""The data of several ranks: every sample counts exactly once; ranks with fewer go along, and add nothing."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.distributed.engines import reads_its_own
from pure_loop.testing.laws.ranks import compare, witness
from tests.support.worlds import KINDS, an_epoch, pool, told

LINEAR = testing.PROBLEMS["linear"]
mse = torch.nn.functional.mse_loss


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.zeros(1)) for i in range(self.n))


class _Around:
    """A loader of the user's own."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def _table(n):
    return TensorDataset(torch.arange(float(n)).reshape(n, 1), torch.zeros(n, 1))


def seen_of(batches, **options):
    """For each of two epochs, the batches that this rank saw, as numbers; and the samples counted at each batch."""
    seen, counts = [[], []], []
    options = {"optimizer": pl.optim.sgd(lr=0.0), "max_duration": "2ep", "parallel": Parallel(**options)}
    for event, state in an_epoch(torch.nn.Linear(1, 1), batches, **options):
        if event is Event.AFTER_BACKWARD:
            seen[state.timestamp.epoch].append((state.timestamp.batch, state.microbatch[0].flatten().tolist()))
        if event is Event.BATCH_END:
            counts.append(state.timestamp.sample)
    return seen, counts


SPLIT = {
    "table": lambda: DataLoader(_table(11), batch_size=5, shuffle=True),
    "list": lambda: [(torch.arange(float(i), i + 5).reshape(5, 1), torch.zeros(5, 1)) for i in (0, 5)],
    "iterable": lambda: DataLoader(_Stream(11), batch_size=5),
    "workers": lambda: DataLoader(_table(11), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True),
}


def test_every_sample_is_seen_exactly_once():
    """Of batches of 5 and of 1, by two ranks; with workers on each, too."""
    found = pool().run(lambda rank: {name: seen_of(make()) for name, make in SPLIT.items()})
    for name in SPLIT:
        n = 10 if name == "list" else 11
        for epoch in range(2):
            together = {}
            for results in found:
                for batch, values in results[name][0][epoch]:
                    together.setdefault(batch, []).extend(values)
            # A rank without a sample of a batch goes through another one, for nothing.
            sizes = {batch: 5 if batch % (-(-n // 5)) < n // 5 else n % 5 for batch in together}
            whole = [value for batch, values in together.items() for value in values[: sizes[batch]]]
            assert sorted(whole) == list(map(float, range(n))), name
        assert all(results[name][1] == found[0][name][1] for results in found)
        assert found[0][name][1][-1] == 2 * n


def test_data_of_each_rank_are_not_split_again():
    """Of a DistributedSampler, in a wrapper, too; and of ``data="own"``, where ranks have unequally many batches and
    end together."""

    def program(rank):
        sampled = DataLoader(_table(12), batch_size=2, sampler=DistributedSampler(_table(12), 2, rank))
        mine = [(torch.full((2, 1), float(10 * rank + i)), torch.zeros(2, 1)) for i in range(3 + 2 * rank)]
        own = [seen_of(mine, data="own", uneven=uneven) for uneven in ("stop", "pad")]
        return seen_of(sampled), seen_of(_Around(sampled)), *own

    for number, ((one, counts), (other, same)) in enumerate(zip(*pool().run(program), strict=True)):
        assert counts == same
        if number >= 2:
            assert len(one[0]) == len(other[0]) == (3 if number == 2 else 5)
            assert counts[len(one[0]) - 1] == (12 if number == 2 else 16)
            continue
        for epoch in range(2):
            mine, theirs = ([value for _, values in seen[epoch] for value in values] for seen in (one, other))
            assert len(mine) == len(theirs) == 6
            assert sorted(mine + theirs) == list(map(float, range(12)))
        assert one[0] != one[1]
        assert counts[-1] == 24


class _Own(torch.utils.data.Sampler):
    """Is no DistributedSampler; one that pads begins anew until each rank has as many samples."""

    def __init__(self, n, rank, pads=True):
        self.n, self.num_replicas, self.rank, self.pads = n, 2, rank, pads

    def __iter__(self):
        return iter([index % self.n for index in range(self.rank, self.n + self.n % 2 * self.pads, 2)])


def _sampled(n, rank, **options):
    return DataLoader(_table(n), 2, sampler=DistributedSampler(_table(n), 2, rank, **options))


UNEVEN = {
    "padding": lambda n, rank: _sampled(n, rank),
    "drop last": lambda n, rank: _sampled(n, rank, drop_last=True),
    "batch sampler": lambda n, rank: DataLoader(_table(n), batch_sampler=BatchSampler(_Own(n, rank), 2, False)),
    "own sampler": lambda n, rank: DataLoader(_table(n), 2, sampler=_Own(n, rank)),
    "wrappers": lambda n, rank: _Around({"a": [_Around(UNEVEN["own sampler"](n, rank))]}),
    "factory": lambda n, rank: _Around((lambda loader: lambda: loader)(UNEVEN["drop last"](n, rank))),
}


def test_a_sampler_that_repeats_or_leaves_out_is_refused_in_evaluation(monkeypatch):
    """On both ranks, before any other is waited for, and only where a sample comes twice or not at all."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        for kind, make in UNEVEN.items():
            for stream in ("eval/val", "predict"):
                assert reads_its_own(Parallel(), make(8, rank), stream)
                fault = "leaves out 1" if kind in ("drop last", "factory") else "gives 1 of them twice"
                says = rf"the {stream} dataloader's \w+ divides 7 samples .* {fault}"
                with pytest.raises(pl.errors.ArgumentError, match=says):
                    reads_its_own(Parallel(), make(7, rank), stream)
            assert reads_its_own(Parallel(), make(7, rank), "train")
        assert reads_its_own(Parallel(), DataLoader(_table(7), 2, sampler=_Own(7, rank, pads=False)), "predict")


def _means(loader):
    """A stream that measures the mean, of 0 .. n - 1 where each sample counts once."""
    identity = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        identity.weight.fill_(1.0)
    mean = pl.metrics.mean(lambda outputs, batch: outputs.flatten(), "mean")
    evaluators = {"val": pl.Evaluator(loader, metrics=mean)}
    return pl.evaluate(identity, evaluators, parallel="replicate")


def test_evaluation_and_prediction_count_each_sample_once():
    """With a batch of one sample, of which a rank has none; of a module, the parameters of rank 0 count. And with
    samplers that don't pad; one that does is refused, and a metric without merge."""
    batches = LINEAR.batches((5, 3, 1), seed=3)
    cross_entropy = torch.nn.functional.cross_entropy
    largest = pl.Metric(
        "largest", lambda: torch.zeros(()), lambda found, outputs, _: outputs.max(), lambda found: found
    )

    def program(rank):
        found = []
        for kind in KINDS:
            model = LINEAR.model(rank)
            evaluated = pl.run(pl.evaluate(model, {"test": batches}, loss=cross_entropy, parallel=kind))
            stream = pl.predict(model, batches, parallel=kind)
            predicted = [state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END]
            found.append((dict(evaluated.metrics["test"]), predicted))
        loaders = [
            DataLoader(_table(7), batch_size=3),
            DataLoader(_table(8), batch_size=3, sampler=DistributedSampler(_table(8), 2, rank)),
            _Around(DataLoader(_table(7), batch_size=3, sampler=_Own(7, rank, pads=False))),
        ]
        means = [float(pl.run(_means(each)).metrics["val"]["mean"]) for each in loaders]
        texts = [
            told(lambda: _means(_Around(UNEVEN["padding"](7, rank)))),
            told(pl.evaluate(model, pl.Evaluator(batches, metrics=largest), parallel="replicate")),
        ]
        return found, means, texts

    (found, means, texts), (others, same, _) = pool().run(program)
    model = LINEAR.model(0)
    alone = pl.run(pl.evaluate(model, {"test": batches}, loss=cross_entropy)).metrics["test"]
    for (metrics, outputs), (others_metrics, others_outputs) in zip(found, others, strict=True):
        for name, value in alone.items():
            torch.testing.assert_close(metrics[name], value)
            torch.testing.assert_close(others_metrics[name], value)
        for mine, theirs, (inputs, _) in zip(outputs, others_outputs, batches, strict=True):
            torch.testing.assert_close(torch.cat([mine, theirs])[: len(inputs)], model(inputs))
        assert len(others_outputs[-1]) == 0
    assert means == same == [3.0, 3.5, 3.0]
    assert "gives 1 of them twice" in texts[0]
    assert re.search(r"metric 'largest' .* can't be put together: give it pl\.Metric", texts[1])


# Ranks with fewer batches or samples than the others.


class _Total(torch.nn.Linear):
    """Sums up what it is given in training, in a buffer."""

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += x.sum()
        return super().forward(x)


class _Packs(torch.nn.Linear):
    """Gives a packed sequence of one number for each sample."""

    def forward(self, x):
        return torch.nn.utils.rnn.pack_sequence(list(super().forward(x)[:, None]))


def _packed(outputs, targets):
    return outputs.data.square().mean()


def _in_parts(outputs, targets):
    value = mse(outputs, targets)
    return {"total": value, "half": value / 2, "constant": 1.0}


def _losses(model, loss, parallel):
    data = [(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)), (torch.tensor([[1.0]]), torch.zeros(1, 1))]
    torch.manual_seed(0)
    stream = an_epoch(model(1, 1), data, loss=loss, parallel=parallel)
    losses = [state.loss for event, state in stream if event is Event.BATCH_END]
    return [float(each) for loss in losses for each in (loss.values() if isinstance(loss, dict) else [loss])]


def test_a_rank_without_samples_goes_along_and_leaves_no_trace():
    """Where the loss is in parts, where outputs are a packed sequence, and in buffers."""
    ways = [(torch.nn.Linear, _in_parts), (_Packs, _packed)]
    # Two microbatches for the first rank; the second one has one sample, and goes through it again for nothing.
    inputs = torch.tensor([[1.0], [10.0], [100.0]])

    def program(rank):
        buffers, losses = [], []
        for kind in KINDS:
            pairs = list(an_epoch(_Total(), [(inputs, torch.zeros(3, 1))], microbatch_size=1, parallel=kind))
            forwards = sum(event is Event.AFTER_FORWARD for event, _ in pairs)
            buffers.append((forwards, float(pairs[-1][1].buffers["total"])))
            losses.append([_losses(*way, kind) for way in ways])
        return buffers, losses

    alone = [_losses(*way, None) for way in ways]
    for buffers, losses in pool().run(program):
        assert buffers == [(2, pytest.approx((2 * 11 + 100) / 3))] * 2  # averaged over ranks by their samples
        for found in losses:
            assert found == [pytest.approx(each, rel=1e-5) for each in alone]


def test_a_padded_rank_adds_nothing_through_evaluations_and_going_on():
    """Its batches go through the loop and through gradients with weight 0."""

    def stream(data, start=None, **options):
        torch.manual_seed(0)
        return an_epoch(torch.nn.Linear(1, 1) if start is None else start, data, max_duration="2ep", **options)

    def program(rank):
        data = [(torch.full((2, 1), 1.0 + i), torch.zeros(2, 1)) for i in range(1 + 2 * rank)]
        parallel = Parallel(data="own", uneven="pad")
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
