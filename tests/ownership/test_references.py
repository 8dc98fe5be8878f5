"""Ownership: what keeps references where the counts of mappings and tensors alone would not show it."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import attrs
import optree
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.stages.references import can_count
from tests.support.donating import NAMESPACE, Count, Kept, assert_same, fit, partition, plain, tensors_of
from tests.support.optimizing import WRAPPERS

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("what", ["params", "opt_state"])
def test_a_tensor_handed_to_another_process_stays(what: str, batch: int) -> None:
    kept = Kept()
    for event, state in fit(optimizer=pl.optim.adamw(lr=0.1)):
        if event is Event.BATCH_END and state.timestamp.batch == batch:
            # What a multiprocessing queue does: it hands over a file, and keeps no reference here.
            tensor = (state.params if what == "params" else state.opt_state["exp_avg"])["0.weight"]
            file, size = tensor.untyped_storage()._share_fd_cpu_()
            del tensor
            received = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            kept.keep("what the other process sees", received)
    assert kept.things
    kept.check()


def test_a_part_of_a_partitions_memory_stays() -> None:
    optimizer = partition()
    kept = Kept()
    for event, state in fit(optimizer=optimizer):
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            kept.keep("the memory of a part", state.opt_state["a"])
    assert kept.things
    kept.check()


@pytest.mark.parametrize("returned", ["parameters", "memory"])
def test_what_an_optimizer_of_ones_own_remembers_stays(count: Count, returned: str) -> None:
    """Where not all parameters are trained, the mapping of those that are is the optimizer's own."""
    kept = Kept()
    inner = pl.optim.sgd(lr=0.1, momentum=0.9)

    def remembering(update: Any) -> Any:
        def wrapped(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
            new, memory = update(grads, memory, params, timestamp)
            if timestamp.batch == 4:
                kept.keep(returned, new if returned == "parameters" else memory)
            return new, memory

        return wrapped

    optimizer = attrs.evolve(inner, update=remembering(inner.update), overwrite=remembering(inner.overwrite))
    model = plain()
    model[0].bias.requires_grad_(False)
    pl.run(fit(model, optimizer=optimizer))
    assert (count.copied, count.reused) == (1, 14)
    kept.check()


def _lookahead() -> pl.Optimizer:
    """Every third step moves slow weights, and the fast ones begin again there, as the same tensors."""

    def init(params: Any) -> Any:
        return FrozenDict(slow=FrozenDict({name: tensor.clone() for name, tensor in params.items()}))

    def update(grads: Any, memory: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        fast = {name: tensor - 0.1 * grads[name].to(tensor) for name, tensor in params.items()}
        if (timestamp.batch + 1) % 3:
            return FrozenDict(fast), memory
        slow = FrozenDict({name: memory["slow"][name].lerp(tensor, 0.5) for name, tensor in fast.items()})
        return slow, FrozenDict(slow=slow)

    def overwrite(grads: Any, memory: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        for name, tensor in params.items():
            tensor.sub_(0.1 * grads[name].to(tensor))
            if (timestamp.batch + 1) % 3 == 0:
                tensor.copy_(memory["slow"][name].lerp_(tensor, 0.5))
        return params, memory

    return pl.Optimizer(name="lookahead", init=init, update=update, overwrite=overwrite, lr=lambda timestamp: 0.1)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_an_optimizer_of_ones_own_may_return_one_tensor_twice(wrapper: Any) -> None:
    finals = []
    for donate in ("auto", False):
        kept = []
        for event, state in fit(optimizer=wrapper(_lookahead()), donate=donate):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                kept.append(state)  # so that the step after it copies
        finals.append(state)
    assert_same(finals[0].params, finals[1].params)


def test_leaves_that_were_kept_stay_where_the_module_has_others_by_then(count: Count) -> None:
    """What keeps the leaves is as much as the module has given up, so that the counts alone show nothing."""
    kept = Kept()

    @pl.algorithm(Event.AFTER_FORWARD)
    def keep(state: pl.State) -> pl.State:
        if state.timestamp.batch == 4 and not kept.things:
            kept.keep("leaves", (state.params, list(state.params.values())))
        return state

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def elsewhere(state: pl.State, stages: Any) -> pl.State:
        if state.timestamp.batch == 4:
            stages.gradients(state.replace(params={name: tensor / 2 for name, tensor in state.params.items()}))
        return state

    pl.run(fit(algorithms=[keep, elsewhere]))
    assert kept.things
    kept.check()
    assert (count.copied, count.reused) == (1, 14)


@pytest.mark.parametrize("batch", [0, 4])
def test_leaves_of_a_forward_that_failed_are_in_no_module(batch: int) -> None:
    """An algorithm continues after the failure, with other parameters until the step."""
    fails = False
    before: list[Any] = []

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise ZeroDivisionError
            return super().forward(x)

    @pl.algorithm(Event.BATCH_START)
    def fail(state: pl.State, stages: Any) -> pl.State:
        nonlocal fails
        if state.timestamp.batch != batch:
            return state
        fails = True
        with pytest.raises(ZeroDivisionError):
            stages.gradients(state)
        fails = False
        before.append(state.params)
        return state.replace(params={name: tensor / 2 for name, tensor in state.params.items()})

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def put_back(state: pl.State) -> pl.State:
        return state.replace(params=before.pop()) if before else state

    torch.manual_seed(0)
    model = Failing(4, 3)
    last = pl.run(fit(model, algorithms=[fail, put_back]))
    assert_same(last, pl.run(fit(model, algorithms=[fail, put_back], donate=False)))


@pytest.mark.parametrize("donate", ["auto", True])
def test_a_memory_that_an_algorithm_put_in_is_its_own(donate: Any) -> None:
    """It keeps mappings of the old memory, which would make up for what the State gave up."""
    kept = Kept()
    old = []

    @pl.algorithm(Event.BATCH_START)
    def replace(state: pl.State) -> pl.State:
        if state.timestamp.batch != 4:
            return state
        memory = optree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state.opt_state, namespace=NAMESPACE
        )
        old.extend(each for each in state.opt_state.values() if isinstance(each, FrozenDict))
        kept.keep("its tensors", tensors_of(memory))
        return state.replace(opt_state=memory)

    pl.run(fit(algorithms=[replace], donate=donate))
    assert kept.things
    kept.check()


@pytest.mark.parametrize("donate", ["auto", True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("batch", [0, 4])
def test_parameters_that_an_algorithm_put_in_are_its_own(donate: Any, frozen: bool, batch: int) -> None:
    kept = Kept()

    @pl.algorithm(Event.BATCH_START)
    def replace(state: pl.State) -> pl.State:
        if state.timestamp.batch != batch:
            return state
        params = {name: tensor / 2 for name, tensor in state.params.items()}
        kept.keep("its tensors", list(params.values()))
        return state.replace(params=params)

    model = plain()
    model[0].bias.requires_grad_(not frozen)
    last = pl.run(fit(model, algorithms=[replace], donate=donate))
    assert kept.things
    kept.check()
    assert_same(last, pl.run(fit(model, algorithms=[replace], donate=False)))


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
@pytest.mark.parametrize("name", ["own", "sam", "gradient_clipping"])
def test_an_algorithm_that_puts_in_gradients_costs_no_copy(count: Count, name: str, watch: Any) -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def halves(state: pl.State) -> pl.State:
        return state.replace(grads={name: tensor / 2 for name, tensor in state.grads.items()})

    algorithms: dict[str, Any] = {
        "own": halves,
        "sam": pl.algorithms.sam(),
        "gradient_clipping": pl.algorithms.gradient_clipping(kind="norm", threshold=0.1),
    }
    last = pl.run(fit(algorithms=[algorithms[name]], watch=watch))
    assert (count.copied, count.reused) == (0, 15)
    assert_same(last, pl.run(fit(algorithms=[algorithms[name]], watch=watch, donate=False)))


def _begins_with(field: str) -> pl.Algorithm:
    """An algorithm that keeps what training began with."""

    @pl.algorithm(Event.BATCH_END, name="first", init=lambda state: FrozenDict(kept=getattr(state, field)))
    def first(state: pl.State) -> pl.State:
        return state

    return first


@pytest.mark.parametrize("donate", ["auto", True])
@pytest.mark.parametrize("name", ["ema", "params", "opt_state"])
def test_a_memory_that_begins_as_the_parameters_costs_no_copied_step(count: Count, name: str, donate: Any) -> None:
    algorithm = pl.algorithms.ema(smoothing=0.5) if name == "ema" else _begins_with(name)
    model = plain()
    model[0].bias.requires_grad_(False)
    kept = Kept()
    for event, state in fit(model, algorithms=[algorithm], donate=donate):
        if event is Event.FIT_START:
            kept.keep("what the algorithm began with", state.algorithm_state)
    assert (count.copied, count.reused) == (0, 15)
    kept.check()
    assert_same(state, pl.run(fit(model, algorithms=[algorithm], donate=False)))
    if name != "opt_state":  # a parameter that no step writes to is no copy
        memory = state.algorithm_state["ema"]["params"] if name == "ema" else state.algorithm_state["first"]["kept"]
        assert memory["0.bias"] is state.params["0.bias"]


@pytest.mark.parametrize("donate", ["auto", True])
@pytest.mark.parametrize("kept_from", [0, 2, 4])
def test_what_a_label_of_a_partition_keeps_stays(count: Count, kept_from: int, donate: Any) -> None:
    """It is given the parameters before a step writes to them."""
    kept, asked = Kept(), [0]

    def label(name: str, tensor: Tensor) -> str:
        if asked[0] >= kept_from:
            kept.keep(f"what the label of {name} was given, call {asked[0]}", tensor)
        asked[0] += 1
        return "all"

    optimizer = pl.optim.partition({"all": pl.optim.adamw(lr=0.1)}, label=label)
    last = pl.run(fit(optimizer=optimizer, donate=donate))
    kept.check()
    assert count.copied <= 1
    assert_same(last, pl.run(fit(optimizer=optimizer, donate=False)))


@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_BACKWARD])
def test_what_a_weak_reference_to_a_mapping_leads_to_later_stays(event: Event) -> None:
    """From AFTER_FORWARD on it is that of the leaves, which the steps after go on with."""
    kept, weak = Kept(), None
    for now, state in fit():
        if weak is not None and now is Event.BATCH_START and (mapping := weak()) is not None:
            kept.keep("a tensor", dict.__getitem__(mapping, "0.weight"), lambda tensor: [tensor])
            del mapping
        if now is event and state.timestamp.batch == 3:
            weak = weakref.ref(state.params)
    kept.check()
