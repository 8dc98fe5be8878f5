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


def _halves_run(parallel, size):
    # Each rank's share of the first batch reaches both halves at once; in the others, its last microbatch one of them.
    batches = [torch.tensor([[x] for x in row]) for row in ((-1.0, 1.0, -2.0, 2.0), (1.0, -1.0, 2.0, -3.0))]
    stream = an_epoch(
        two_halves(),
        [(batch, torch.zeros(4, 1)) for batch in batches],
        microbatch_size=size,
        parallel=parallel,
    )
    return dict(pl.run(stream).params)


def _written_to_in_place(parallel, size=None):
    """Outputs of three dimensions, which a Linear gives as a view on a CPU, and a loss that writes to them."""

    def loss(outputs, targets):
        outputs += 1
        return (outputs - targets).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    data = [(torch.randn(4, 5, 2).double(), torch.randn(4, 5, 2).double()) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end = pl.run(
            pl.fit(
                model,
                data,
                loss=loss,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="2ep",
                microbatch_size=size,
                parallel=parallel,
                strict=False,  # the first batches refuse a loss that writes to its outputs; this is of those that may
            )
        )
        return {name: full_tensor(tensor) for name, tensor in end.params.items()}


@pytest.mark.parametrize("size", [None, 1])
def test_outputs_that_are_views_may_be_written_to_where_ranks_are_sharded(size):
    alone = _written_to_in_place(None, size)
    for found in pool(kind="shard").run(lambda rank: _written_to_in_place("shard", size)):
        for name in alone:
            torch.testing.assert_close(found[name], alone[name])


def test_a_last_microbatch_that_leaves_a_parameter_out_still_exchanges_it():
    alone = _halves_run(None, 2)
    for found in pool().run(lambda rank: _halves_run(Parallel(find_unused_parameters=False), 1)):
        for name in alone:
            torch.testing.assert_close(found[name], alone[name])


def test_sharded_ranks_that_reach_other_parameters_are_told():
    def program(rank):
        data = [(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.zeros(4, 1))] * 2
        pl.run(an_epoch(two_halves(), data, parallel="shard"))

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
        stream = an_epoch(_Late(), data, parallel="replicate")
        return dict(pl.run(stream).buffers)

    # The means over the third and the fourth batch.
    for buffers in pool().run(program):
        assert buffers["steps"] == 4
        assert buffers["mean"] == pytest.approx(6.0 + 8.0)


def _a_gradient(state, stages):
    stages.backward(stages.loss(stages.forward(state)))


def _others(state):
    with torch.device("meta"):  # for the shapes: to look at state.params would make what it shows
        params = {name: torch.full(each.shape, 0.3, device="cpu") for name, each in _recomputed().named_parameters()}
    return state.replace(params=params, buffers={name: 3 * tensor for name, tensor in state.buffers.items()})


def _an_evaluation(state, stages):
    stages.validate(state, label="inside", batch=0)


def _an_evaluation_of_others(state, stages):
    stages.validate(_others(state), label="inside", batch=0)


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


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize(
    ("kind", "size"), [(None, None), (None, 1), ("replicate", None), ("replicate", 1), ("shard", None)]
)
def test_what_is_computed_in_the_middle_of_a_microbatch_changes_nothing(kind, size, precision):
    def run(*algorithms):
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
        plain = run()
        events = (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD)
        insides = (_a_gradient, _an_evaluation, _an_evaluation_of_others, _a_gradient_of_others)
        each = list(itertools.product(events, insides))
        tried = [[one] for one in each] if THOROUGH else [each]
        return [
            [(event, inside.__name__) for event, inside in some]
            for some in tried
            if not all(map(torch.equal, run(*[meanwhile(*one) for one in some]), plain))
        ]

    changed = [program(0)] if kind is None else pool(kind=kind).run(program)
    assert not any(changed), changed


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD])
def test_sharded_ranks_refuse_a_gradient_among_those_that_are_added_up(event):
    @pl.algorithm(event)
    def meanwhile(state, stages):
        _a_gradient(state, stages)
        return state

    def program(rank):
        data = [(torch.ones(4, 1), torch.zeros(4, 1))]
        model = torch.nn.Linear(1, 1)
        pl.run(an_epoch(model, data, algorithms=[meanwhile], microbatch_size=1, parallel="shard"))

    with pytest.raises(RankError, match=r"a gradient of microbatch 0 .* has come to microbatch 1: .* BATCH_START"):
        pool(kind="shard").run(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "compile"),
    [(Event.AFTER_LOSS, False), (Event.AFTER_BACKWARD, False), (Event.BATCH_START, True), (Event.AFTER_BACKWARD, True)],
)
def test_sharded_ranks_refuse_gradients_that_would_be_lost(event, compile):
    @pl.algorithm(event)
    def puts_in(state):
        return state.replace(grads={name: torch.ones_like(tensor) for name, tensor in state.params.items()})

    def program(rank):
        data = [(torch.ones(4, 1), torch.zeros(4, 1))]
        options = {"algorithms": [puts_in], "parallel": "shard", "compile": compile, "microbatch_size": 1}
        with interpreted():
            pl.run(an_epoch(torch.nn.Linear(1, 1), data, **options))

    with pytest.raises(RankError, match=r"state\.grads was set before a backward of batch 0.*AFTER_TRAIN_BATCH"):
        pool(kind="shard").run(program)


def test_a_second_forward_in_the_loss_is_refused():
    @pl.algorithm(Event.AFTER_LOSS)
    def consistent(state, stages):
        again = stages.forward(state).outputs
        return state.replace(loss=state.loss + (state.outputs - again).square().mean())

    with pytest.raises(pl.errors.ModelError, match="depends on a second forward of this batch"):
        pl.run(an_epoch(torch.nn.Linear(1, 1), [(torch.ones(4, 1), torch.zeros(4, 1))], algorithms=[consistent]))


class _Registers(torch.nn.Module):
    """None at first, set by the first forward; another one is registered there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
            self.register_buffer("seen", torch.tensor(0))
        self.seen += 1
        return self.layer(x) - self.mean


class _Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 1))
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        self.bank = torch.cat([self.bank, x])
        return self.layer(x)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_the_first_forward_registers_agree(kind):
    """The mean over both ranks, in every State from the first batch on; and training resumes with them."""
    data = [(torch.tensor([[1.0], [3.0]]) * (1 + i), torch.zeros(2, 1)) for i in range(3)]

    def program(rank):
        states = [state for event, state in an_epoch(_Registers(), data, parallel=kind) if event is Event.BATCH_END]
        resumed = pl.run(an_epoch(states[0], data, parallel=kind))
        module = resumed.module()
        return [dict(state.buffers) for state in (*states, resumed)], dict(module.named_buffers())

    for found, named in pool(kind=kind).run(program):
        for index, buffers in enumerate(found):
            assert buffers["mean"].tolist() == [2.0]
            assert buffers["seen"] == min(index, 2) + 1
        assert {name: tensor.tolist() for name, tensor in named.items()} == {"mean": [2.0], "seen": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_change_their_shape_are_refused_by_name(kind):
    """Each rank would have a bank of its own samples, and ranks average."""
    data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 2

    def program(rank):
        pl.run(an_epoch(_Grows(), data, parallel=kind))

    with pytest.raises(RankError, match=r"changed the buffer 'bank' from \(0, 1\) float32 to \(1, 1\)"):
        pool(kind=kind).run(program)


def test_buffers_that_one_rank_registers_and_another_does_not_are_refused_by_name():
    data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 2

    def program(rank):
        pl.run(an_epoch(_Uneven(rank), data, parallel="replicate"))

    with pytest.raises(RankError, match=r"the buffer 'mean' is \(1,\) float32 on rank 1 and None on rank 0"):
        pool().run(program)


class _Uneven(_Registers):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        return super().forward(x) if self.rank else self.layer(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_eval_mode_stays_so_on_several_ranks(kind):
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(2)]

    def program(rank):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        model[1].eval()
        return dict(pl.run(an_epoch(model, data, parallel=kind)).buffers)

    for buffers in pool(kind=kind).run(program):
        assert buffers["0.num_batches_tracked"] == 2
        assert buffers["1.num_batches_tracked"] == 0
        assert buffers["1.running_mean"].tolist() == [0.0] * 3
