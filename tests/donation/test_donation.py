"""Donation: where nothing was kept the memory is reused, in whatever way the stream is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.donation import references
from tests.state.test_memory import live_tensors, without_collector
from tests.support.donating import DATA, Count, assert_same, fit, partition, plain

pytestmark = [
    pytest.mark.skipif(not references.can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]


class Net(nn.Module):
    """Layers of most kinds: norm with buffers, tied and frozen parameters, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.seen_by is not None:
            self.seen_by(self)
        out: Tensor = self.head(self.frozen(self.second(torch.relu(self.norm(self.first(x))))))
        return out

    seen_by: Callable[[nn.Module], None] | None = None


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def a_for_loop(stream: Any) -> None:
    for _event, _state in stream:
        pass


def a_while_loop(stream: Any) -> None:
    while True:
        try:
            _event, _state = next(stream)
        except StopIteration:
            return


def a_comprehension(stream: Any) -> None:
    assert [1 for _event, _state in stream]


def through_a_generator(stream: Any) -> None:
    def again() -> Iterator[Any]:
        yield from stream

    for _event, _state in again():
        pass


def with_progress(stream: Any) -> None:
    for _event, _state in pl.progress(stream, file=io.StringIO()):
        pass


def reading(stream: Any) -> None:
    for event, state in stream:
        if event is Event.BATCH_END:
            assert state.loss.item() > 0
            norm = state.params["0.weight"].norm().item() + float(state.opt_state["step"])
            assert norm > 0


@pytest.mark.parametrize(
    "consumer",
    [a_for_loop, a_while_loop, a_comprehension, through_a_generator, with_progress, pl.run, reading],
)
@pytest.mark.parametrize(
    "watch", [None, {Event.BATCH_END}, {Event.BATCH_END, Event.EPOCH_END}], ids=["all", "one", "two"]
)
def test_memory_is_reused_where_it_was_not_kept(count: Count, consumer: Callable[[Any], Any], watch: Any) -> None:
    consumer(fit(watch=watch))
    assert (count.copied, count.reused) == (0, 15)


@pytest.mark.parametrize("samples", [6, 4])
def test_memory_is_reused_whether_or_not_gradients_are_divided(count: Count, samples: int) -> None:
    data = [(x[:samples], y[:samples]) for x, y in DATA]
    a_for_loop(fit(data=data, watch={Event.BEFORE_FORWARD, Event.BATCH_END}))
    # The first batch shows what becomes of a State.
    assert (count.copied, count.reused) == (1, 14)


@pytest.mark.parametrize("model", [plain, net], ids=["plain", "net"])
@pytest.mark.parametrize(
    "optimizer",
    [
        pl.optim.adamw(lr=0.1),
        pl.optim.adam(lr=0.1, amsgrad=True, weight_decay=0.1),
        pl.optim.sgd(lr=0.1),
        pl.optim.sgd(lr=0.1, momentum=0.9),
        partition(),
        pl.optim.from_torch(torch.optim.RAdam, lr=0.1),
        pl.optim.from_torch(torch.optim.SGD, lr=pl.schedules.linear(0.1, 0.0, "3ep")),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_every_optimizer_of_ours_writes_in_place_and_trains_as_without(
    count: Count, model: Any, optimizer: Any
) -> None:
    last = pl.run(fit(model(), optimizer=optimizer, microbatch_size=4))
    assert (count.copied, count.reused) == (0, 15)
    assert_same(last, pl.run(fit(model(), optimizer=optimizer, microbatch_size=4, donate=False)))
    assert_same(last, pl.run(fit(model(), optimizer=optimizer, microbatch_size=4, donate=True)))


@pytest.mark.parametrize("order", ["current", "2021"])
def test_the_first_step_of_a_fresh_start_writes_in_place_in_either_order(count: Count, order: Any) -> None:
    last = pl.run(fit(order=order))
    assert (count.copied, count.reused) == (0, 15)
    assert_same(last, pl.run(fit(order=order, donate=False)))


def test_evaluation_and_algorithms_between_the_steps_cost_no_copies(count: Count) -> None:
    """EMA and label smoothing read and keep nothing of the loop's; evaluation binds other weights in between."""
    algorithms = [pl.algorithms.ema(half_life="3ba"), pl.algorithms.label_smoothing(0.1)]
    pl.run(fit(evaluators={"val": DATA}, eval_interval="2ba", algorithms=algorithms, clip_grad=1.0))
    assert count.reused >= 14 - 1


def test_an_optimizer_of_ones_own_copies_and_trains(count: Count) -> None:
    class OnesOwn(torch.optim.Adagrad):
        """Nothing says that it leaves gradients alone."""

    optimizer = pl.optim.from_torch(OnesOwn, lr=0.1)
    assert optimizer.overwrite is None
    assert_same(pl.run(fit(optimizer=optimizer)), pl.run(fit(optimizer=optimizer, donate=False)))
    assert count.reused == 0


def test_memory_stays_that_of_one_update() -> None:
    """With donation there is one set of parameters and moments, not two."""
    model = nn.Linear(300, 300)
    size = sum(p.numel() * 4 for p in model.parameters())
    data = [(torch.zeros(2, 300), torch.zeros(2, dtype=torch.int64))] * 2
    most = 0
    with without_collector():
        for event, state in fit(model, data=data, max_duration="4ep"):
            if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END) and state.timestamp.batch > 3:
                most = max(most, live_tensors()[1])
    # Parameters, two moments and the gradients, and a little.
    assert most <= 4.2 * size, f"{most / size:.2f} times the parameters"


@pytest.mark.parametrize("lr", [0.1, lambda t: 0.1 / (1 + t.batch)], ids=["fixed", "scheduled"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_gradients_of_an_algorithm_between_those_of_autograd(lr: Any, amsgrad: bool) -> None:
    """What is known of an unread memory is used with gradients that are known to lie as it does, and with no others."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def others(state: pl.State) -> pl.State:
        if state.timestamp.batch % 3 != 2:
            return state
        turned = {
            name: grad.t().contiguous().t() if grad.ndim == 2 else grad.clone() for name, grad in state.grads.items()
        }
        return state.replace(grads=pl.FrozenDict(turned))

    settings: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=lr, amsgrad=amsgrad), "algorithms": [others]}
    assert_same(pl.run(fit(**settings)), pl.run(fit(donate=False, **settings)))
