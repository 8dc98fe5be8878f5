"""What ranks exchange in a forward and a backward: buffers, and gradients of whatever the loss reaches."""

from __future__ import annotations

import itertools
import warnings

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
from pure_loop.testing.ranks import RankError
from tests.conftest import THOROUGH
from tests.support.worlds import KINDS, an_epoch, pool, two_halves

ONES = [(torch.ones(4, 1), torch.zeros(4, 1))]


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
    """Running statistics, also of a layer in eval mode, and a buffer that is written to from the third forward on."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = (torch.nn.BatchNorm1d(3, momentum=1.0) for _ in range(2))
        self.frozen.eval()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.steps += 1
            if self.steps > 2:
                self.late += x.mean()
        return self.layer(self.frozen(self.norm(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_means_over_ranks(kind):
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(7 + i, 3, generator=generator), torch.zeros(7 + i, 1)) for i in range(4)]
    inputs = [each for each, _ in data]
    for buffers in pool(kind=kind).run(lambda rank: dict(pl.run(an_epoch(_Total(), data, parallel=kind)).buffers)):
        torch.testing.assert_close(buffers["norm.running_mean"], inputs[-1].mean(0))
        assert buffers["norm.num_batches_tracked"] == buffers["steps"] == 4
        torch.testing.assert_close(buffers["late"], (inputs[2].mean() + inputs[3].mean()).reshape(1))
        assert buffers["frozen.num_batches_tracked"] == 0
        assert buffers["frozen.running_mean"].tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_on_weights_has_its_gradient_and_an_autocast_around_the_loop_changes_nothing(kind):
    @pl.algorithm(Event.AFTER_LOSS)
    def penalty(state):
        return state.replace(loss=state.loss + 0.3 * sum(tensor.square().sum() for tensor in state.params.values()))

    case = testing.Case(plan=Plan(batches=(5, 4), max_duration="2ep", microbatch_size=2), problem="tied")
    half = testing.Case(plan=Plan(batches=(6, 4), max_duration="2ep"), problem="linear", precision="amp_bf16")
    alone = witness(whole(case, 2).stream([penalty]))

    def program(rank):
        plain = witness(half.stream(parallel=kind))
        with torch.autocast("cpu", enabled=False):
            inside = witness(half.stream(parallel=kind))
        return witness(case.stream([penalty], parallel=kind)), inside, plain

    for seen, inside, plain in pool(kind=kind).run(program):
        compare(seen, alone, kind, 1e-5)
        compare(inside, plain, kind, 0.0)


def _written_to_in_place(parallel, size=None):
    """Outputs of three dimensions, which a Linear gives as a view on a CPU, and a loss that writes to them."""

    def loss(outputs, targets):
        outputs += 1
        return (outputs - targets).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    data = [(torch.randn(4, 5, 2).double(), torch.randn(4, 5, 2).double()) for _ in range(2)]
    options = {"loss": loss, "max_duration": "2ep", "microbatch_size": size, "parallel": parallel}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The first batches refuse a loss that writes to its outputs, and this is of those that may: not strict.
        state = pl.run(an_epoch(model, data, strict=False, **options))
        return {name: full_tensor(tensor) for name, tensor in state.params.items()}


def _reached_by_turns(parallel, size):
    # Each rank's share of the first batch reaches both halves at once; in the others, its last microbatch one of them.
    batches = [torch.tensor([[x] for x in row]) for row in ((-1.0, 1.0, -2.0, 2.0), (1.0, -1.0, 2.0, -3.0))]
    data = [(batch, torch.zeros(4, 1)) for batch in batches]
    return dict(pl.run(an_epoch(two_halves(), data, microbatch_size=size, parallel=parallel)).params)


def test_outputs_that_are_views_and_parameters_that_a_microbatch_leaves_out():
    for size in (None, 1):
        alone = _written_to_in_place(None, size)
        for found in pool(kind="shard").run(lambda rank, size=size: _written_to_in_place("shard", size)):
            torch.testing.assert_close(found, alone)
    alone = _reached_by_turns(None, 2)
    for found in pool().run(lambda rank: _reached_by_turns(Parallel(find_unused_parameters=False), 1)):
        torch.testing.assert_close(found, alone)


def _a_gradient(state, stages):
    stages.backward(stages.loss(stages.forward(state)))


def _others(state):
    with torch.device("meta"):  # for the shapes: to look at state.params would make what it shows
        params = {name: torch.full(each.shape, 0.3, device="cpu") for name, each in _recomputed().named_parameters()}
    return state.replace(params=params, buffers={name: 3 * tensor for name, tensor in state.buffers.items()})


def _an_evaluation(state, stages):
    stages.validate(state, label="inside", batch=0)


def _an_evaluation_of_others(state, stages):
    _an_evaluation(_others(state), stages)


def _a_gradient_of_others(state, stages):
    _a_gradient(_others(state), stages)


@pl.algorithm(Event.AFTER_LOSS)
def _penalty(state):
    return state.replace(loss=state.loss + 0.1 * sum(tensor.exp().sum() for tensor in state.params.values()))


class _Recomputed(torch.nn.Sequential):
    """Its first half is gone through again in the backward, in the mode and with the numbers that it had."""

    def __init__(self, *halves):
        super().__init__(*halves)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, batch):
        return self[1](checkpoint(lambda x: self[0](x * self.scale) ** 2, batch[0], use_reentrant=False))

    def loss(self, outputs, batch):
        with torch.autocast("cpu", enabled=False):  # a cast for the forward and for this would add up other numbers
            penalty = self[1](torch.ones(1, 4)).exp().sum()
        return (outputs - batch[1]).square().mean() + 0.1 * penalty


def _recomputed():
    half = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 4))
    return _Recomputed(half, torch.nn.Linear(4, 1))


EVENTS = (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD)
INSIDES = (_a_gradient, _an_evaluation, _an_evaluation_of_others, _a_gradient_of_others)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [(None, 1), ("replicate", None), ("replicate", 1), ("shard", None)])
def test_what_is_computed_in_the_middle_of_a_microbatch_changes_nothing(kind, size):
    """Slow: at each event in it a gradient and an evaluation, of the parameters or of others, in both precisions."""

    def run(precision, *algorithms):
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(2)]
        torch.manual_seed(0)
        options = {"microbatch_size": size, "precision": precision, "parallel": kind}
        options |= {"algorithms": (_penalty, *algorithms), "loss": None}  # after the loss the last one comes first
        # What autocast remembers of parameters lasts as long as the outermost one.
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            state = pl.run(an_epoch(_recomputed(), data, **options))
        return [full_tensor(tensor) for tensor in state.params.values()]

    def meanwhile(event, inside):
        def changes_nothing(state, stages):
            inside(state, stages)
            return state

        return pl.algorithm(event, name=f"{inside.__name__} at {event.name}")(changes_nothing)

    def program(rank):
        each = list(itertools.product(EVENTS, INSIDES))
        tried = [[one] for one in each] if THOROUGH else [each]
        return [
            (precision, [(event, inside.__name__) for event, inside in some])
            for precision in ("fp32", "amp_bf16")
            for some in tried
            if not all(map(torch.equal, run(precision, *[meanwhile(*one) for one in some]), run(precision)))
        ]

    changed = [program(0)] if kind is None else pool(kind=kind).run(program)
    assert not any(changed), changed


# What is refused.


def _puts_in(state):
    return state.replace(grads={name: torch.ones_like(tensor) for name, tensor in state.params.items()})


def _among(state, stages):
    _a_gradient(state, stages)
    return state


AMONG = r"a gradient of microbatch 0 .* has come to microbatch 1: .* BATCH_START"
LOST = r"state\.grads was set before a backward of batch 0.*AFTER_TRAIN_BATCH"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "event", "compile", "message"),
    [
        (_among, Event.BEFORE_FORWARD, False, AMONG),
        (_among, Event.BEFORE_BACKWARD, False, AMONG),
        (_among, Event.AFTER_BACKWARD, False, AMONG),
        (_puts_in, Event.AFTER_LOSS, False, LOST),
        (_puts_in, Event.AFTER_BACKWARD, False, LOST),
        (_puts_in, Event.BATCH_START, True, LOST),
        (_puts_in, Event.AFTER_BACKWARD, True, LOST),
    ],
)
def test_sharded_ranks_refuse_gradients_among_those_that_are_added_up(function, event, compile, message):
    """Slow: each is a failed program, after which ranks form a new group."""

    def program(rank):
        options = {"algorithms": [pl.Algorithm("mine", {event: function})], "parallel": "shard", "compile": compile}
        with interpreted():
            pl.run(an_epoch(torch.nn.Linear(1, 1), ONES, microbatch_size=1, **options))

    with pytest.raises(RankError, match=message):
        pool(kind="shard").run(program)


def test_sharded_ranks_that_reach_other_parameters_are_told():
    def program(rank):
        data = [(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.zeros(4, 1))] * 2
        pl.run(an_epoch(two_halves(), data, parallel="shard"))

    with pytest.raises(RankError, match="reached other parameters on one rank than on another"):
        pool().run(program)


def test_a_second_forward_in_the_loss_is_refused():
    @pl.algorithm(Event.AFTER_LOSS)
    def consistent(state, stages):
        again = stages.forward(state).outputs
        return state.replace(loss=state.loss + (state.outputs - again).square().mean())

    with pytest.raises(pl.errors.ModelError, match="depends on a second forward of this batch"):
        pl.run(an_epoch(torch.nn.Linear(1, 1), ONES, algorithms=[consistent]))


# Buffers that a forward registers.


class _Registers(torch.nn.Module):
    """None at first, set by the first forward; another one is registered there."""

    def __init__(self, does=True):
        super().__init__()
        self.register_buffer("mean", None)
        self.layer = torch.nn.Linear(1, 1)
        self.does = does

    def forward(self, x):
        if not self.does:
            return self.layer(x)
        if self.mean is None:
            self.mean = x.mean(0)
            self.register_buffer("seen", torch.tensor(0))
        self.seen += 1
        return self.layer(x) - self.mean


class _Grows(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("bank", torch.zeros(0, 1))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x])
        return super().forward(x)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_the_first_forward_registers_agree(kind):
    """The mean over both ranks, in every State from the first batch on; and training resumes with them. Such as change
    their shape are refused by name: each rank would have a bank of its own samples, and ranks average."""
    data = [(torch.tensor([[1.0], [3.0]]) * (1 + i), torch.zeros(2, 1)) for i in range(3)]

    def program(rank):
        states = [state for event, state in an_epoch(_Registers(), data, parallel=kind) if event is Event.BATCH_END]
        resumed = pl.run(an_epoch(states[0], data, parallel=kind))
        return [dict(state.buffers) for state in (*states, resumed)], dict(resumed.module().named_buffers())

    for found, named in pool(kind=kind).run(program):
        for index, buffers in enumerate(found):
            assert buffers["mean"].tolist() == [2.0]
            assert buffers["seen"] == min(index, 2) + 1
        assert {name: tensor.tolist() for name, tensor in named.items()} == {"mean": [2.0], "seen": 3}
    with pytest.raises(RankError, match=r"changed the buffer 'bank' from \(0, 1\) float32 to \(1, 1\)"):
        pool(kind=kind).run(lambda rank: pl.run(an_epoch(_Grows(), data, parallel=kind)))


def test_buffers_that_one_rank_registers_and_another_does_not_are_refused_by_name():
    with pytest.raises(RankError, match=r"the buffer 'mean' is \(1,\) float32 on rank 1 and None on rank 0"):
        pool().run(lambda rank: pl.run(an_epoch(_Registers(rank == 1), ONES * 2, parallel="replicate")))
