"""``fit(verify=)``: flipped bits are found and named where they change a State, and nothing else is."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import checksums, count_of_differences
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError, VerificationError
from pure_loop.metrics import accuracy, mean
from pure_loop.ranges import settings_of
from pure_loop.testing._compositions import ALGORITHMS, built
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.problems import as_problem
from pure_loop.testing.strategies import algorithms as random_algorithms
from pure_loop.testing.strategies import cases, plans
from pure_loop.verify.comparison import unequal_leaves
from pure_loop.verify.leaves import LOOP
from tests.support import faults
from tests.support.faults import PLACES, Fault, bits_of
from tests.support.runs import convnet, equal, images, mlp, points, stream
from tests.support.samples import simplest
from tests.support.served import required, served
from tests.support.tiers import examples

SETTINGS: list[dict[str, Any]] = [
    {},
    {"microbatch_size": 3},
    {"nonfinite": "skip"},
    {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "watch": {Event.BATCH_END}},
    {"algorithms": [pl.algorithms.ema(half_life="2ba")]},
    {"algorithms": [pl.algorithms.sam()], "max_duration": "2ba"},
]


def case(number: int) -> tuple[str, int, int, dict[str, Any]]:
    """The place, batch and seed of a fault, and the settings of its run."""
    choice = random.Random(number)
    options = SETTINGS[choice.randrange(len(SETTINGS))]
    return list(PLACES)[number % len(PLACES)], choice.randrange(2), number, options


def upto(stream: Any, batch: int) -> list[Any]:
    """The pairs up to the BATCH_END of a batch; None and the error in its place, if there is one."""
    pairs: list[Any] = []
    try:
        for event, state in stream:
            pairs.append((event, state))
            if event is Event.BATCH_END and state.timestamp.batch == batch + 1:
                break
    except NonFiniteError as error:
        pairs.append((None, error))
    return pairs


def first_difference(ours: list[Any], others: list[Any]) -> Any:
    """The first event at which two streams differ; None: the States at the end are the same."""
    (end, last), (other_end, other_last) = ours[-1], others[-1]
    if end is other_end is None:
        return None
    if end == other_end and bits_of(last) == bits_of(other_last):
        return None
    for (event, state), (other_event, other) in zip(ours, others, strict=False):
        if event is not other_event or event is None:
            return Event.BATCH_END
        if bits_of(state) != bits_of(other):
            return event
    return Event.BATCH_END


def hold_to_what_a_flip_changes(number: int, run: int) -> bool:
    """Whether the flip is one that changes the State; it is reported then, with its stage, and else is not."""
    place, batch, seed, options = case(number)
    pieces = 3 if "microbatch_size" in options else 1
    made = {"place": place, "batch": batch, "seed": seed, "microbatches": pieces}
    everything = {**options, "watch": None, "clock": lambda: 0.0}
    sound = upto(faults.fit(Fault(run=0, **made), **everything), batch)
    flawed = upto(faults.fit(Fault(run=1, **made), **everything), batch)
    event = first_difference(sound, flawed)
    fault = Fault(run=run, **made)
    verified = faults.fit(fault, verify="1ba", **{"clock": lambda: 0.0, **options})
    if event is None:
        last = pl.run(verified)
        assert fault.has_fired or place == "loss", f"{number}: {place}"
        if run == 2:
            equal(last.params, pl.run(faults.fit(Fault(run=0, **made), **options)).params)
        return False
    with pytest.raises(VerificationError) as caught:
        pl.run(verified)
    error = caught.value
    stage = "flip" if PLACES[place] == "flip" and _is_of_algorithm(place, event) else LOOP[event]
    assert error.stage == stage, f"{number}: {place}, {event}: {error}"
    assert error.transient, f"{number}: {place}: {error}"
    assert error.agreeing == ((2, 3) if run == 1 else (1, 3))
    assert (error.batch, error.rank) == (batch, 0)
    return True


def _is_of_algorithm(place: str, event: Event) -> bool:
    """Whether the first difference is at the event of the algorithm that flips."""
    at = {"inputs": Event.BATCH_START, "loss": Event.AFTER_LOSS, "gradient": Event.AFTER_BACKWARD}
    return event is at.get(place, Event.AFTER_TRAIN_BATCH)


@pytest.mark.parametrize("run", [1, 2])
def test_a_flipped_bit_is_found_where_it_changes_the_state(run: int) -> None:
    changing = [hold_to_what_a_flip_changes(number, run) for number in range(run, 84, 2)]
    assert len(changing) >= 40
    assert sum(changing) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_flipped_bits_are_found_where_they_change_the_state(part: int) -> None:
    changing = [hold_to_what_a_flip_changes(number, 1 + number // 7 % 2) for number in range(part, 1040, 4)]
    assert len(changing) == 260
    assert 0.6 < sum(changing) / len(changing) < 1


def in_turn(state: pl.State) -> pl.State:
    """An algorithm that counts its calls outside of the State."""
    CALLS[0] += 1
    return state.replace(grads={name: gradient * CALLS[0] for name, gradient in state.grads.items()})


CALLS = [0]


def impure(event: Event, function: Any) -> pl.Algorithm:
    return pl.algorithm(event)(function)


def test_an_algorithm_that_is_not_pure_is_no_transient_difference() -> None:
    with pytest.raises(VerificationError, match=r"check_algorithm.*resume from the last checkpoint") as caught:
        pl.run(stream(mlp(), points(), [impure(Event.AFTER_BACKWARD, in_turn)], verify="2ba"))
    error = caught.value
    assert (error.stage, error.leaf, error.batch) == ("in_turn", "grads/0.weight", 1)
    assert error.agreeing is None
    assert not error.transient
    assert error.difference is not None
    assert error.difference > 0
    assert error.timestamp is not None


def test_of_several_algorithms_at_one_event_the_first_that_differs_is_named() -> None:
    def pure(state: pl.State) -> pl.State:
        return state.replace(grads={name: 2 * gradient for name, gradient in state.grads.items()})

    made = [impure(Event.AFTER_BACKWARD, function) for function in (pure, in_turn)]
    for algorithms in (made, [*reversed(made)]):
        with pytest.raises(VerificationError) as caught:
            pl.run(stream(mlp(), points(), algorithms, verify="1ba"))
        assert caught.value.stage == "in_turn"


def test_an_algorithm_that_is_called_by_another_is_named_by_that_one() -> None:
    """``sam`` computes gradients of its own, in which algorithms of a microbatch are called."""
    shots = [0]

    def once(state: pl.State) -> pl.State:
        if state.timestamp.batch != 1:
            return state
        shots[0] += 1
        # The first run of the batch calls it twice: for the loop, and for sam.
        return state if shots[0] != 2 else state.replace(loss=2 * state.loss)

    with pytest.raises(VerificationError) as caught:
        pl.run(stream(mlp(), points(), [impure(Event.AFTER_LOSS, once), pl.algorithms.sam()], verify="2ba"))
    assert (caught.value.stage, caught.value.transient) == ("sam", True)


def test_an_algorithm_that_only_one_run_calls_is_named() -> None:
    shots = [0]

    def due(state: pl.State) -> bool:
        shots[0] += 1
        return shots[0] == 1

    @pl.algorithm(Event.BEFORE_FORWARD, when=due)
    def halve(state: pl.State) -> pl.State:
        inputs, targets = state.microbatch
        return state.replace(microbatch=(0.5 * inputs, targets))

    with pytest.raises(VerificationError, match="did not come to it") as caught:
        pl.run(stream(mlp(), points(), [halve], verify="1ba"))
    assert caught.value.leaf is None
    assert caught.value.agreeing == (2, 3)


@pytest.mark.parametrize("run", [1, 2])
def test_a_step_that_is_not_finite_in_one_run_is_a_difference(run: int) -> None:
    runs = [0]

    @pl.algorithm(Event.AFTER_LOSS)
    def overflow(state: pl.State) -> pl.State:
        runs[0] += state.timestamp.batch == 1
        return state.replace(loss=state.loss * (torch.inf if runs[0] == run and state.timestamp.batch == 1 else 1.0))

    with pytest.raises(VerificationError) as caught:
        pl.run(stream(mlp(), points(), [overflow], verify="2ba"))
    error = caught.value
    assert (error.stage, error.leaf, error.transient) == ("overflow", "loss", True)
    assert error.agreeing == ((2, 3) if run == 1 else (1, 3))


def test_a_loss_that_is_nan_in_both_runs_is_the_error_that_it_is() -> None:
    data = points()
    data[1][0][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="batch 1"):
        pl.run(stream(mlp(), data, verify="2ba"))
    skipped = pl.run(stream(mlp(), data, verify="1ba", nonfinite="skip"))
    assert int(skipped.skipped) == 2


SERVED: list[Any] = []


class Counting:
    """Data that counts its batches."""

    def __iter__(self) -> Any:
        for item in points():
            SERVED.append(item)
            yield item


def test_data_are_not_loaded_again_and_events_come_once() -> None:
    SERVED.clear()
    events = [event for event, _ in stream(mlp(), Counting(), verify="1ba")]
    assert len(SERVED) == 6
    assert events == [event for event, _ in stream(mlp(), points())]


def test_observers_and_random_numbers_of_the_surroundings_see_nothing_of_it() -> None:
    seen: dict[str | None, Any] = {}
    for verify in (None, "1ba"):
        torch.manual_seed(0)
        noted: list[Any] = []
        callbacks = [lambda event, state, noted=noted: noted.append((event, bits_of(state)))]
        pl.run(stream(convnet(), images(), callbacks=callbacks, verify=verify))
        seen[verify] = noted, torch.rand(3).tolist()
    assert seen[None] == seen["1ba"]


def test_only_due_batches_are_computed_again() -> None:
    calls: list[int] = []

    def note(state: pl.State) -> pl.State:
        calls.append(state.timestamp.batch)
        return state

    pl.run(stream(mlp(), points(), [impure(Event.BEFORE_TRAIN_BATCH, note)], verify="3ba"))
    assert calls == [0, 1, 2, 2, 3, 4, 5, 5]
    # Batches count from the start of training, where it resumes too.
    half = pl.run(stream(mlp(), points(), max_duration="2ba"))
    calls.clear()
    pl.run(stream(half, points(), [impure(Event.BEFORE_TRAIN_BATCH, note)], verify="3ba"))
    assert calls == [2, 2, 3, 4, 5, 5]


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "not strict": {"strict": False},
    "of 2021": {"order": "2021"},
    "microbatches": {"microbatch_size": 2},
    "a size that is found": {"microbatch_size": "auto", "strict": False},
    "several batches a step": {"batches_per_step": 2},
    "bf16": {"precision": "amp_bf16"},
    "loss scale": {"precision": "amp_fp16"},
    "skipping": {"nonfinite": "skip"},
    "evaluators": {"evaluators": {"val": images(1)}, "eval_interval": "1ba"},
    "train_metrics": {"train_metrics": [accuracy(), mean(lambda outputs, batch: outputs.sum(dim=1), "total")]},
    "stop": {"algorithms": [pl.Algorithm("stop", {Event.BATCH_END: lambda state: state.replace(stop=True)})]},
    "stages": {"algorithms": [pl.algorithms.sam(), pl.algorithms.ema(half_life="2ba")]},
    "clipping": {"clip_grad": 0.1},
    "watching one event": {"watch": {Event.BATCH_END}, "strict": False},
    "watching none": {"watch": (), "strict": False},
    "always donating": {"donate": True, "strict": False},
    "never donating": {"donate": False, "strict": False},
    "deterministic": {"deterministic": True},
    "an optimizer without an update in place": {"optimizer": pl.optim.from_torch(torch.optim.Adagrad, lr=0.1)},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_verified_run_is_a_run(way: str) -> None:
    options = WAYS[way]
    for every in ("1ba", "2ba"):
        verified, plain = (pl.run(stream(convnet(), images(), **options, verify=verify)) for verify in (every, None))
        assert bits_of(verified) == bits_of(plain)


@examples(15, 1000)
@given(
    case=cases(problems=["mlp", "convolution"], plans=plans(max_batches=6)),
    composition=random_algorithms(problem="mlp"),
    every=st.integers(1, 3),
)
def test_any_run_is_the_same_with_it(case: Case, composition: Any, every: int) -> None:
    plain = list(case.stream([composition]))
    verified = list(case.stream([composition], verify=f"{every}ba"))
    assert len(plain) == len(verified)
    for (event, state), (other_event, other) in zip(plain, verified, strict=True):
        assert event is other_event
        assert not differences(state, other)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_passes(name: str) -> None:
    factory = ALGORITHMS[name]
    needed = {key: st.just(value) for key, value in required(factory).items() if key not in settings_of(factory)}
    problem = as_problem(served(factory) or "mlp")
    ends = []
    for verify in (None, "2ba"):
        end = pl.run(
            pl.fit(
                *(problem.model(0), problem.batches((4, 4), 1)),
                loss=problem.loss,
                optimizer=pl.optim.sgd(lr=0.01, momentum=0.9),
                max_duration="2ep",
                microbatch_size=2,
                algorithms=[simplest(built(factory, **needed))],
                evaluators={"val": problem.batches((2,), 2)},
                verify=verify,
            )
        )
        ends.append(bits_of(end))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (100, ArgumentTypeError, r'verify=100 of type int: give an interval in batches, such as "100ba"'),
        (True, ArgumentTypeError, r"verify=True of type bool"),
        (0, ArgumentTypeError, r"verify=0 of type int.*or None"),
        ("0ba", ArgumentError, r"verify='0ba': .*longer than 0; to verify no batch, leave verify= out"),
        ("-1ba", ArgumentError, r"verify='-1ba'.*not negative"),
        ("1ep", ArgumentError, r"verify='1ep': .*every 100th"),
        ("2.5ba", ArgumentError, r"verify='2.5ba'.*whole numbers"),
        (lambda state: True, ArgumentTypeError, r"verify=.*of type function"),
    ],
)
def test_other_values_are_refused_at_the_call(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        stream(mlp(), points(), verify=value)


@pytest.mark.parametrize("compile", [True, "where possible"])
def test_a_graph_has_no_stages(compile: Any) -> None:
    with pytest.raises(ArgumentError, match=r"verify='5ba' with compile=.*a graph has no stages"):
        stream(mlp(), points(), strict=False, verify="5ba", compile=compile)


def test_explain_says_how_often() -> None:
    shown = io.StringIO()
    pl.explain(
        *(mlp(), points()),
        loss=functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        verify="100ba",
        file=shown,
    )
    assert "verify         every 100 batches one is computed twice" in shown.getvalue()


def test_tools_look_at_a_verified_run_as_at_any_other() -> None:
    seen = []
    for verify in (None, "1ba"):
        pairs = stream(mlp(), points(), [pl.algorithms.sam()], strict=False, verify=verify)
        seen.append([(change.event, change.by, change.leaf) for change in pl.changes(pairs)])
    assert seen[0] == seen[1]


class Pair:
    """Outputs of a class that torch knows nothing of."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


def test_outputs_of_a_class_of_the_users_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(self.layer(x))

    def loss(outputs: Pair, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.scores, targets)

    pl.run(stream(Model(), points(), loss=loss, strict=False, verify="1ba"))


TENSORS: dict[str, torch.Tensor] = {
    "float64": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "float32": torch.tensor([[1.0], [0.0]]),
    "bfloat16": torch.tensor([1.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "int64": torch.tensor([1, 2]),
    "bool": torch.tensor([True, False]),
    "a scalar": torch.tensor(0.0),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "sparse": torch.tensor([0.0, 3.0]).to_sparse(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_bit_of_a_leaf_counts(kind: str) -> None:
    tensor = TENSORS[kind]

    state = pl.State.create(nn.Linear(1, 1))

    def of(leaf: torch.Tensor) -> pl.State:
        return state.replace(outputs=leaf)

    assert unequal_leaves(of(tensor), of(tensor.clone()))[0] == []
    values = tensor._values() if tensor.is_sparse else tensor
    dense = torch.view_as_real(values) if values.is_complex() else values.contiguous()
    size = 8 * dense.element_size()
    for bit in range(size):
        if kind == "bool" and bit:
            break
        changed = dense.clone()
        mask = 1 << bit if bit < size - 1 or size == 8 else -(1 << bit)
        changed.view(faults.INTEGERS[dense.element_size()]).view(-1)[0] ^= mask
        other = torch.view_as_complex(changed) if values.is_complex() else changed
        other = torch.sparse_coo_tensor(tensor._indices(), other, tensor.shape) if tensor.is_sparse else other
        assert unequal_leaves(of(tensor), of(other))[0] == ["outputs"], bit
        assert checksums({"x": tensor}) != checksums({"x": other}), bit
        assert count_of_differences(tensor, other)


def test_nan_equals_nan_and_zero_is_not_minus_zero() -> None:
    state = pl.State.create(nn.Linear(1, 1))

    def of(*numbers: float) -> pl.State:
        return state.replace(outputs=torch.tensor(numbers))

    assert not unequal_leaves(of(torch.nan, 1.0), of(torch.nan, 1.0))[0]
    assert not unequal_leaves(of(torch.nan), of(-torch.nan))[0]
    assert unequal_leaves(of(torch.nan, 1.0), of(1.0, torch.nan))[0]
    assert unequal_leaves(of(0.0), of(-0.0))[0]
