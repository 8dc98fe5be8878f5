"""Donation: what was kept never changes.

Law 2 decides: whatever is kept (States, mappings, tensors, views, NumPy arrays, DLPack capsules, graphs), by whomever
(the loop's body, algorithms, callbacks, the model's own forward, other threads), however the loop is written, has the
bits of a copy made when it was kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import attrs
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.donation import donation, references
from pure_loop.stages import engine
from pure_loop.state import raw_opt_state
from tests.support.donating import CONSUMERS, COUNTERS, DATA, Kept, consume, fit, tensors_of

pytestmark = pytest.mark.skipif(not references.can_count(), reason="references can't be counted in this interpreter")


def gradients(state: pl.State) -> Any:
    # What an algorithm reads where there are none yet is an error.
    return state._grads if isinstance(state._grads, dict) else {}


def some_tensor(state: pl.State, which: int) -> Tensor:
    found = tensors_of((state.params, state.opt_state))
    tensor: Tensor = found[which % len(found)]
    return tensor


WAYS: dict[str, Callable[[Kept, pl.State, int], None]] = {
    "the State": lambda kept, state, i: kept.keep("a State", state),
    "the State in a tuple": lambda kept, state, i: kept.keep("a State in a tuple", (1, state)),
    "its parameters": lambda kept, state, i: kept.keep("a mapping", state.params),
    "its memory": lambda kept, state, i: kept.keep("a memory", state.opt_state),
    "a mapping in its memory": lambda kept, state, i: kept.keep("an inner mapping", state.opt_state["exp_avg"]),
    "a tensor": lambda kept, state, i: kept.keep("a tensor", some_tensor(state, i)),
    "a view": lambda kept, state, i: kept.keep("a view", some_tensor(state, i).view(-1)[:1]),
    "a detached tensor": lambda kept, state, i: kept.keep("a detached tensor", some_tensor(state, i).detach()),
    "an array": lambda kept, state, i: kept.keep(
        "an array", some_tensor(state, i).detach().numpy(), lambda array: [torch.from_numpy(array.copy())]
    ),
    "a list of views": lambda kept, state, i: kept.keep(
        "views", [tensor.t() if tensor.ndim == 2 else tensor[:1] for tensor in tensors_of(state.params)]
    ),
    "a storage": lambda kept, state, i: kept.keep(
        "a storage",
        some_tensor(state, i).untyped_storage(),
        lambda storage: [torch.empty(0).set_(storage).clone()],
    ),
    "a graph": lambda kept, state, i: kept.keep(
        "a graph",
        (state.params["0.weight"].detach().requires_grad_(), torch.ones(5, 4)),
        lambda pair: list(torch.autograd.grad((pair[0] * pair[0] * pair[1]).sum(), [pair[0]])),
    ),
    "its gradients": lambda kept, state, i: kept.keep("gradients", gradients(state)),
    "a gradient": lambda kept, state, i: kept.keep("a gradient", list(gradients(state).values())[i % 4 :][:1]),
    "a view of a gradient": lambda kept, state, i: kept.keep(
        "a view of a gradient", [each.view(-1)[:1] for each in gradients(state).values()]
    ),
    "an array of a gradient": lambda kept, state, i: kept.keep(
        "an array", [each.numpy() for each in gradients(state).values()], lambda kept: [torch.tensor(a) for a in kept]
    ),
    "a module": lambda kept, state, i: kept.keep("a module", state.module(), lambda module: list(module.parameters())),
}


def own_graph(kept: Kept, state: pl.State, which: int) -> None:
    """A graph saves the very tensor, not one that shares its storage."""
    tensor = some_tensor(state, which)
    factor = torch.ones_like(tensor).requires_grad_()
    product = (factor * tensor).sum()
    kept.keep(
        "a graph through a tensor itself",
        (factor, product),
        lambda pair: list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True)),
    )


def own_capsule(kept: Kept, state: pl.State, which: int) -> None:
    # Only what needs no gradient can be exported as it is.
    tensor = some_tensor(state, which)
    _keep_capsule(kept, tensor.detach() if tensor.requires_grad else tensor)


def capsule(kept: Kept, state: pl.State, which: int) -> None:
    _keep_capsule(kept, some_tensor(state, which).detach())


def _keep_capsule(kept: Kept, tensor: Tensor) -> None:
    held = torch.utils.dlpack.to_dlpack(tensor)
    numbers = tensor.clone()
    seen: list[Tensor] = []

    def read(held: Any) -> list[Any]:
        if not seen:
            seen.append(torch.utils.dlpack.from_dlpack(held))
        return seen

    kept.things.append(("a DLPack capsule", held, read, [numbers]))


WAYS["a capsule"] = capsule
WAYS["a capsule of a tensor itself"] = own_capsule
WAYS["a graph through a tensor itself"] = own_graph

EVENTS = [
    *(Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_FORWARD),
    *(Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    *(Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
    *(Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EVAL_START, Event.EVAL_END),
]
WHO = ["body", "callback", "algorithm", "forward"]


@st.composite
def keepings(draw: Any) -> tuple[str, str, Event, int, int]:
    return (
        draw(st.sampled_from(WHO)),
        draw(st.sampled_from(sorted(WAYS))),
        draw(st.sampled_from(EVENTS)),
        draw(st.integers(0, 14)),
        draw(st.integers(0, 11)),
    )


@settings(max_examples=60, deadline=None)
@given(
    keepings=st.lists(keepings(), min_size=1, max_size=4),
    watch=st.sampled_from([None, {Event.BATCH_END}, {Event.AFTER_TRAIN_BATCH}, {Event.EPOCH_END}, set(EVENTS)]),
    microbatch_size=st.sampled_from([None, 4, 2]),
    large=st.booleans(),
    clip_grad=st.sampled_from([None, 0.1]),
    consumer=st.sampled_from(CONSUMERS),
    evaluators=st.booleans(),
    options=st.sampled_from([{}, {"nonfinite": "skip"}, {"precision": "amp_fp16"}]),
    left_out=st.frozensets(st.integers(0, 14), max_size=3),
    optimizer=st.sampled_from([pl.optim.adamw(lr=0.1), pl.optim.from_torch(torch.optim.RAdam, lr=0.1)]),
    counter=st.sampled_from(["as here", *COUNTERS]),
)
def test_what_was_kept_never_changes(
    keepings: list[Any],
    watch: Any,
    microbatch_size: Any,
    large: bool,
    clip_grad: Any,
    consumer: str,
    evaluators: bool,
    options: dict[str, Any],
    left_out: frozenset[int],
    optimizer: pl.optim.Optimizer,
    counter: str,
) -> None:
    kept = Kept()

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def spoil(state: pl.State) -> pl.State:
        if not options or state.timestamp.batch not in left_out:
            return state
        return state.replace(grads={name: each * float("inf") for name, each in gradients(state).items()})

    first_forward: list[Any] = [None]

    def keeps(who: str, event: Event, state: pl.State) -> None:
        for holder, way, when, batch, which in keepings:
            if holder == who and when is event and state.timestamp.batch == batch:
                WAYS[way](kept, state, which)

    def callback(event: Event, state: pl.State) -> None:
        keeps("callback", event, state)

    def handler(state: pl.State) -> pl.State:
        assert state.event is not None
        keeps("algorithm", state.event, state)
        return state

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first_forward[0] = (first_forward[0] or 0) + 1
            for holder, way, _, batch, which in keepings:
                if holder == "forward" and first_forward[0] == batch + 1:
                    weights = list(self.parameters())
                    weight = weights[which % len(weights)]
                    kept.keep(f"{way} in the forward", weight if "State" in way else weight.detach())
            out: Tensor = super().forward(x)
            return out

    measured = patch.object(references, "MEASURED", references.measure(COUNTERS[counter]))
    with measured, patch.object(engine, "_LARGE", 0 if large else engine._LARGE):
        torch.manual_seed(0)
        stream = fit(
            Model(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
            watch=watch,
            microbatch_size=microbatch_size,
            clip_grad=clip_grad,
            optimizer=optimizer,
            callbacks=[callback],
            algorithms=[spoil, pl.algorithm(*EVENTS, name="keeper")(handler)],
            evaluators={"val": DATA[:1]} if evaluators else None,
            eval_interval="4ba",
            **options,
        )
        consume(stream, consumer, keeps, kept)
    kept.check()


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize(
    "event",
    [
        *(Event.BATCH_END, Event.AFTER_TRAIN_BATCH, Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS),
        *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    ],
    ids=lambda e: e.value,
)
@pytest.mark.usefixtures("gradients_of_each_size")
def test_each_way_of_keeping_keeps(way: str, event: Event) -> None:
    kept = Kept()
    for now, state in fit(microbatch_size=2):
        if now is event and state.timestamp.batch in (3, 8):
            WAYS[way](kept, state, 0)
    kept.check()


@pytest.mark.parametrize("order", ["current", "2021"])
@pytest.mark.parametrize("event", [Event.INIT, Event.FIT_START], ids=lambda e: e.value)
def test_what_was_kept_before_the_first_step_stays(order: Any, event: Event) -> None:
    kept = Kept()
    for now, state in fit(order=order):
        if now is event:
            kept.keep("the parameters", dict(state.params))
    assert kept.things
    kept.check()


@pytest.mark.parametrize("who", ["algorithm", "callback"])
@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}, {Event.EPOCH_END}], ids=str)
def test_a_state_that_the_loop_was_never_given_stays(who: str, watch: Any) -> None:
    """The State that is updated is not the one in the loop variable, and either may be kept."""
    kept = Kept()

    def keep(state: pl.State) -> pl.State:
        if state.timestamp.batch in (4, 7):
            kept.keep("a State", state)
        return state

    def look(event: Event, state: pl.State) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            keep(state)

    keeper = pl.algorithm(Event.AFTER_TRAIN_BATCH, name="keeper")(keep)
    for _event, _state in fit(
        watch=watch,
        algorithms=[keeper] if who == "algorithm" else [],
        callbacks=[look] if who == "callback" else [],
    ):
        pass
    assert kept.things
    kept.check()


def _by_flattening(state: pl.State) -> Any:
    return optree.tree_leaves(state, namespace="pure_loop")


def _by_torchs_flattening(state: pl.State) -> Any:
    return torch.utils._pytree.tree_leaves(state)


READINGS: dict[str, Callable[[pl.State], Any]] = {
    "by attribute": lambda state: state.opt_state,
    "by name": lambda state: getattr(state, attrs.fields(type(state)).opt_state.name),
    "by flattening": _by_flattening,
    "by torch's flattening": _by_torchs_flattening,
    "by reducing": lambda state: state.__reduce__(),
    "by a dict": lambda state: attrs.asdict(state, recurse=False),
    "by mapping": lambda state: optree.tree_map(lambda leaf: leaf, state, namespace="pure_loop"),
    "by another State": lambda state: state.replace(seed=1).opt_state,
}


@pytest.mark.parametrize("what", ["exp_avg", "step"])
@pytest.mark.parametrize("way", sorted(READINGS))
@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["all", "one"])
def test_who_has_read_the_memory_of_an_optimizer_keeps_what_he_took_of_it(what: str, way: str, watch: Any) -> None:
    """In whatever way: the loop counts references to these tensors again once they were read, and not before."""
    kept = Kept()
    for event, state in fit(watch=watch):
        if event is Event.BATCH_END and state.timestamp.batch in (5, 9):
            wanted = set(map(id, optree.tree_leaves(raw_opt_state(state)[what], namespace="pure_loop")))
            found = [each for each in tensors_of(READINGS[way](state)) if id(each) in wanted]
            assert found
            kept.keep("a tensor", found[0])
            del found
    kept.check()


def test_an_optimizer_of_ones_own_may_keep_what_it_is_given() -> None:
    kept = Kept()
    adamw = pl.optim.adamw(lr=0.1)

    def overwrite(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        assert adamw.overwrite is not None
        new = adamw.overwrite(grads, opt_state, params, timestamp)
        if timestamp.batch in (5, 9):
            kept.keep("a tensor", opt_state["exp_avg"]["0.weight"])
        return new

    optimizer = attrs.evolve(adamw, overwrite=overwrite)
    for _event, _state in fit(optimizer=optimizer):
        pass
    assert len(kept.things) == 2
    kept.check()


@pytest.mark.parametrize("what", ["exp_avg", "step"])
def test_a_loop_that_takes_all_for_unread_is_caught(what: str) -> None:
    with patch.object(donation, "opt_state_read_marker", lambda: None), pytest.raises(AssertionError, match="changed"):
        test_who_has_read_the_memory_of_an_optimizer_keeps_what_he_took_of_it(what, "by attribute", None)


def test_steps_are_counted_in_place_while_the_number_is_not_read() -> None:
    """Once it was read, the next number is another tensor."""
    steps: list[int] = []
    read = {5, 9}
    for event, state in fit():
        if event is not Event.BATCH_END:
            continue
        batch = state.timestamp.batch
        assert raw_opt_state(state)["step"].item() == batch
        steps.append(id(raw_opt_state(state)["step"]))
        if batch in read:
            assert state.opt_state["step"].item() == batch
    same = [batch for batch, (one, other) in enumerate(itertools.pairwise(steps), 2) if one == other]
    assert set(range(4, 15)) - set(same) == {batch + 1 for batch in read}


@pytest.mark.parametrize("at", [Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END], ids=lambda at: at.name)
def test_a_memory_that_an_algorithm_puts_in_unread_is_its_own(at: Event) -> None:
    kept = Kept()
    optimizer = pl.optim.adamw(lr=0.1)

    @pl.algorithm(at, name="resets")
    def resets(state: pl.State) -> pl.State:
        if state.timestamp.batch not in (5, 9):
            return state
        memory = optimizer.init(state.params)
        kept.keep("the memory put in", memory["exp_avg"]["0.weight"])
        kept.keep("its number of steps", memory["step"])
        return state.replace(opt_state=memory)

    for _event, _state in fit(optimizer=optimizer, algorithms=[resets]):
        pass
    assert kept.things
    kept.check()
