"""What ranks exchange in a forward and a backward: buffers, and gradients of whatever the loss reaches."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.compile import interpreted
from pure_loop.distributed import Parallel
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, whole, witness
from tests.support.worlds import KINDS, an_epoch, pool, told, two_halves

ONES = [(torch.ones(4, 1), torch.zeros(4, 1))]


def params_of(stream):
    return {name: full_tensor(tensor) for name, tensor in pl.run(stream).params.items()}


def test_dropout_differs_between_ranks_and_shuffling_does_not():
    """The order of samples is that of one rank, and each epoch has its own."""
    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, 64))

    def run(parallel):
        model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.5))
        loader = DataLoader(data, batch_size=6, shuffle=True)
        pairs = list(an_epoch(model, loader, max_duration="2ep", parallel=parallel))
        seen = [s.batch[0].flatten().tolist() for event, s in pairs if event is Event.AFTER_DATALOADER]
        return seen, [s.outputs.detach() != 0 for event, s in pairs if event is Event.AFTER_FORWARD]

    (one, kept), (other, others) = pool().run(lambda rank: run("replicate"))
    assert not all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))
    together = [mine + theirs for mine, theirs in zip(one, other, strict=True)]
    assert together == run(None)[0]
    assert sorted(together[0] + together[1]) == sorted(together[2] + together[3]) == list(map(float, range(12)))
    assert one[:2] != one[2:]


class _Total(torch.nn.Module):
    """Running statistics, also of a layer in eval mode; a buffer that is None at first, and one that is registered by
    the first forward, unless it does not, and written to from the third one on."""

    def __init__(self, does=True, grows=False):
        super().__init__()
        self.norm, self.frozen = (torch.nn.BatchNorm1d(3, momentum=1.0) for _ in range(2))
        self.frozen.eval()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(0, 3))
        self.does, self.grows = does, grows

    def forward(self, x):
        if self.training and self.does:
            if self.mean is None:
                self.mean = x.mean(0)
                self.register_buffer("steps", torch.tensor(0))
                self.register_buffer("late", torch.zeros(1))
            self.steps += 1
            if self.steps > 2:
                self.late += x.mean()
        if self.grows:
            self.bank = torch.cat([self.bank, x])
        return self.layer(self.frozen(self.norm(x)))


def test_buffers_are_means_over_ranks():
    """Those that a forward registers, too, in every State and where training resumes. One that changes its shape is
    refused by name, because each rank would have a bank of its own samples; so is one that one rank alone registers."""
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(7 + i, 3, generator=generator), torch.zeros(7 + i, 1)) for i in range(4)]
    inputs = [each for each, _ in data]

    def program(rank):
        found = []
        for kind in KINDS:
            states = [state for event, state in an_epoch(_Total(), data, parallel=kind) if event is Event.BATCH_END]
            resumed = pl.run(an_epoch(states[0], data, parallel=kind))
            found.append([dict(state.buffers) for state in (states[0], states[-1], resumed)])
            assert float(dict(resumed.module().named_buffers())["steps"]) == 4
        texts = [told(an_epoch(_Total(grows=True), data, parallel=kind)) for kind in KINDS]
        return found, [*texts, told(an_epoch(_Total(rank == 1), data, parallel="replicate"))]

    for found, (*grown, alone) in pool().run(program):
        for first, *lasts in found:
            torch.testing.assert_close(first["mean"], inputs[0].mean(0))
            for last in lasts:
                torch.testing.assert_close(last["norm.running_mean"], inputs[-1].mean(0))
                assert last["norm.num_batches_tracked"] == last["steps"] == 4
                torch.testing.assert_close(last["late"], (inputs[2].mean() + inputs[3].mean()).reshape(1))
                assert torch.equal(last["mean"], first["mean"])
                assert last["frozen.num_batches_tracked"] == 0
                assert last["frozen.running_mean"].tolist() == [0.0] * 3
        for text in grown:
            assert re.search(r"changed the buffer 'bank' from \(0, 3\) float32 to \(\d, 3\)", text)
        assert re.search(r"the buffer '\w+' is \(.*\) \w+ on rank 1 and None on rank 0", alone)


def _overwrites(outputs, targets):
    outputs += 1
    return (outputs - targets).square().mean()


def _written_to_in_place(parallel, size):
    """Outputs of three dimensions, which a Linear gives as a view on a CPU, and a loss that writes to them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    data = [(torch.randn(4, 5, 2).double(), torch.randn(4, 5, 2).double()) for _ in range(2)]
    # The first batches refuse a loss that writes to its outputs, and this is of those that may: not strict.
    return params_of(an_epoch(model, data, loss=_overwrites, microbatch_size=size, parallel=parallel, strict=False))


def _reached_by_turns(parallel, size):
    # Each rank's share of the first batch reaches both halves at once; in the others, its last microbatch one of them.
    batches = [torch.tensor([[x] for x in row]) for row in ((-1.0, 1.0, -2.0, 2.0), (1.0, -1.0, 2.0, -3.0))]
    data = [(batch, torch.zeros(4, 1)) for batch in batches]
    return params_of(an_epoch(two_halves(), data, microbatch_size=size, parallel=parallel))


@pl.algorithm(Event.AFTER_LOSS)
def _weights(state):
    return state.replace(loss=state.loss + 0.3 * sum(tensor.square().sum() for tensor in state.params.values()))


def test_whatever_the_loss_reaches_has_the_gradient_of_one_rank():
    """Weights themselves, outputs that are views, and parameters that a microbatch leaves out. An autocast around the
    loop changes nothing."""
    case = testing.Case(plan=Plan(batches=(5, 4), max_duration="2ep", microbatch_size=2), problem="tied")
    half = testing.Case(plan=Plan(batches=(6, 4), max_duration="2ep"), problem="linear", precision="amp_bf16")

    def program(rank):
        found = []
        for kind in KINDS:
            plain = witness(half.stream(parallel=kind))
            with torch.autocast("cpu", enabled=False):
                compare(witness(half.stream(parallel=kind)), plain, kind, 0.0)
            found.append(witness(case.stream([_weights], parallel=kind)))
        views = [_written_to_in_place("shard", size) for size in (None, 1)]
        return found, views, _reached_by_turns(Parallel(find_unused_parameters=False), 1)

    alone = witness(whole(case, 2).stream([_weights]))
    for found, views, turns in pool().run(program):
        for seen, kind in zip(found, KINDS, strict=True):
            compare(seen, alone, kind, 1e-5)
        for size, view in zip((None, 1), views, strict=True):
            torch.testing.assert_close(view, _written_to_in_place(None, size))
        torch.testing.assert_close(turns, _reached_by_turns(None, 2))


def test_parameters_that_only_some_batches_reach():
    """By default and where it is asked for; else a rank is told by the next batch."""

    def stream(unused):
        # Each rank reaches one half, and the last batch the first one alone.
        data = [(torch.tensor([[1.0], [second]]), torch.zeros(2, 1)) for second in (-1.0, 2.0)]
        return an_epoch(two_halves(), data, parallel=Parallel(find_unused_parameters=unused, timeout=4.0))

    def program(rank):
        found = []
        for unused in (None, True):
            grads = [dict(state.grads) for event, state in stream(unused) if event is Event.AFTER_TRAIN_BATCH]
            found.append([[name for name, tensor in each.items() if tensor is None] for each in grads])
        return found, told(stream(False))

    answers = pool().run(program)
    assert [found for found, _ in answers] == [[[[], ["two.weight", "two.bias"]]] * 2] * 2
    assert any("find_unused_parameters=True" in text for _, text in answers)


def test_weights_of_any_size_fit_gradients_of_half_precision():
    """Gradients at AFTER_BACKWARD are of their own order, and neither 0 nor infinite."""
    data = [(torch.randn(8, 3).half(), torch.randn(8, 2).half()) for _ in range(3)]

    def loss(outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def program(rank):
        largest = []
        for weight in (1e-6, 1e6):
            task = pl.Task(loss=loss, weight=lambda batch, weight=weight: weight * len(batch[0]))
            model = torch.nn.Linear(3, 2).half()
            for event, state in an_epoch(model, data, loss=task, parallel="replicate"):
                if event is Event.AFTER_BACKWARD:
                    largest.append(max(float(grad.abs().max()) for grad in state.grads.values()))
        return largest

    for largest in pool().run(program):
        assert len(largest) == 6
        assert all(1e-3 < number < 1e3 for number in largest)


# What an algorithm computes in the middle of a microbatch.


def _a_gradient(state, stages):
    stages.backward(stages.loss(stages.forward(state)))


def _an_evaluation(state, stages):
    stages.validate(state, label="inside", batch=0)


def _of_others(inside):
    def of_others(state, stages):
        with torch.device("meta"):  # for the shapes: to look at state.params would make what it shows
            shapes = {name: each.shape for name, each in _Recomputed().named_parameters()}
        params = {name: torch.full(shape, 0.3) for name, shape in shapes.items()}
        inside(state.replace(params=params, buffers={k: 3 * each for k, each in state.buffers.items()}), stages)

    return of_others


class _Recomputed(torch.nn.Sequential):
    """Its first half is gone through again in the backward, in the mode and with the numbers that it had."""

    def __init__(self):
        half = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 4))
        super().__init__(half, torch.nn.Linear(4, 1))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self[1](checkpoint(lambda x: self[0](x * self.scale) ** 2, x, use_reentrant=False))


EVENTS = (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD)
INSIDES = (_a_gradient, _an_evaluation, _of_others(_a_gradient), _of_others(_an_evaluation))


@pytest.mark.slow  # a gradient or an evaluation at each event
def test_what_is_computed_in_the_middle_of_a_microbatch_changes_nothing():
    """At each event in it a gradient and an evaluation, of the parameters or of others, in both precisions."""

    def run(kind, size, precision, *algorithms):
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(2)]
        torch.manual_seed(0)
        # After the loss the last algorithm comes first.
        options = {
            "microbatch_size": size,
            "precision": precision,
            "parallel": kind,
            "algorithms": (_weights, *algorithms),
        }
        # What autocast remembers of parameters lasts as long as the outermost one.
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            return [*params_of(an_epoch(_Recomputed(), data, **options)).values()]

    def meanwhile(event, inside, number):
        def changes_nothing(state, stages):
            inside(state, stages)
            return state

        return pl.algorithm(event, name=f"{number} at {event.name}")(changes_nothing)

    def changed(*ways):
        each = [meanwhile(event, *one) for event, one in itertools.product(EVENTS, zip(INSIDES, range(4), strict=True))]
        ways = [(kind, size, precision) for kind, size in ways for precision in ("fp32", "amp_bf16")]
        return [way for way in ways if not all(map(torch.equal, run(*way, *each), run(*way)))]

    assert changed((None, 1)) == []
    assert pool().run(lambda rank: changed(("replicate", 1), ("shard", None))) == [[], []]


# What is refused.


def _puts_in(state):
    return state.replace(grads={name: torch.ones_like(tensor) for name, tensor in state.params.items()})


def _among(state, stages):
    _a_gradient(state, stages)
    return state


@pl.algorithm(Event.AFTER_LOSS)
def _consistent(state, stages):
    again = stages.forward(state).outputs
    return state.replace(loss=state.loss + (state.outputs - again).square().mean())


AMONG = r"a gradient of microbatch 0 .* has come to microbatch 1: .* BATCH_START"
LOST = r"state\.grads was set before a backward of batch 0.*AFTER_TRAIN_BATCH"
REFUSED = [(_among, event, {}, AMONG) for event in (EVENTS[0], EVENTS[3], Event.AFTER_BACKWARD)]
REFUSED += [(_puts_in, event, {}, LOST) for event in (Event.AFTER_LOSS, Event.AFTER_BACKWARD)]
REFUSED += [(_puts_in, event, {"compile": True}, LOST) for event in (Event.BATCH_START, Event.AFTER_BACKWARD)]


@pytest.mark.slow  # with the compiler
def test_sharded_ranks_refuse_gradients_among_those_that_are_added_up():
    """And are told where they reach other parameters; a second forward in the loss is refused on one rank, too."""

    def program(rank):
        texts = []
        for function, event, options, _ in REFUSED:
            options = {"algorithms": [pl.Algorithm("mine", {event: function})], "parallel": "shard", **options}
            with interpreted():
                texts.append(told(an_epoch(torch.nn.Linear(1, 1), ONES, microbatch_size=1, **options)))
        data = [(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.zeros(4, 1))] * 2
        return [*texts, told(an_epoch(two_halves(), data, parallel="shard"))]

    for *texts, parts in pool().run(program):
        for text, (_, _, _, words) in zip(texts, REFUSED, strict=True):
            assert re.search(words, text, re.DOTALL), text
        assert "reached other parameters on one rank than on another" in parts
    with pytest.raises(pl.errors.ModelError, match="depends on a second forward of this batch"):
        pl.run(an_epoch(torch.nn.Linear(1, 1), ONES, algorithms=[_consistent]))
