"""Training with ``from_torch`` is the class by hand, and resumes bit for bit, whatever the class keeps."""

from __future__ import annotations

import collections
import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, ResumeError
from tests.support import scripted
from tests.support.scripted import AddsInTheFirstStep, Holds, RemovesAKey, Scripted
from tests.support.tiers import examples, tiers

mse = nn.functional.mse_loss
BATCHES = 5
LR = pl.schedules.linear(0.05, 0.01, f"{BATCHES}ba")


def model(bias: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=g), torch.randn(4, 4, generator=g)) for _ in range(BATCHES)]


Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def by_hand(module: nn.Module, *parts: tuple[Callable[[str], bool], Make, Any]) -> list[Tensor]:
    """Parameters after a plain loop; each part has its parameters, its optimizer and its schedule or None."""
    optimizers = []
    for takes, make, lr in parts:
        optimizers.append((make([p for name, p in module.named_parameters() if takes(name)]), lr))
    for number, (inputs, targets) in enumerate(batches()):
        mse(module(inputs), targets).backward()
        # Where a class draws random numbers, they are of the run's seed and this batch.
        with pl.random.seeded_all(pl.random.derive(0, "update", 0, number)):
            for optimizer, lr in optimizers:
                if lr is not None:
                    optimizer.param_groups[0]["lr"] = lr(pl.Timestamp(batch=number))
                optimizer.step()
        module.zero_grad()
    return [param.detach() for param in module.parameters()]


def fit(start: Any, optimizer: Any, **options: Any) -> Any:
    return pl.fit(start, batches(), loss=mse, optimizer=optimizer, max_duration="1ep", **options)


def assert_same(params: Any, expected: Sequence[Tensor]) -> None:
    for (name, param), other in zip(params.items(), expected, strict=True):
        assert torch.equal(param, other), name


def assert_resumes(
    make: Callable[[], pl.optim.Optimizer],
    expected: list[Tensor],
    start: Callable[[], nn.Module] = model,
    points: Sequence[int] = range(BATCHES),
    **options: Any,
) -> None:
    """Training gives ``expected``, and so it does from each State, from a file of it, and by autoresume."""
    kept = [state for event, state in fit(start(), make(), **options) if event is Event.BATCH_END]
    assert_same(kept[-1].params, expected)
    with TemporaryDirectory() as folder:
        for point in points:
            assert_same(pl.run(fit(kept[point], make(), **options)).params, expected)
            path = f"{folder}/{point}.safetensors"
            pl.save(kept[point], path)
            assert_same(pl.run(fit(pl.load(path, model=start()), make(), **options)).params, expected)
            resumed = pl.run(fit(start(), make(), load_path=path, **options))
            assert_same(resumed.params, expected)
        saver = pl.callbacks.CheckpointSaver(folder, interval="1ba")
        stream = fit(start(), make(), callbacks=[saver], **options)
        next(None for event, state in stream if event is Event.BATCH_END and state.timestamp.batch == 3)
        stream.close()
        assert_same(pl.run(fit(start(), make(), autoresume=folder, **options)).params, expected)


OF_TORCH = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


@pytest.mark.parametrize("name", tiers(OF_TORCH, {"ASGD", "Adafactor", "Muon", "Rprop"}))
def test_classes_of_torch_resume(name: str) -> None:
    """Comparing ``opt_state`` with ``init`` on the meta device failed for Adafactor and ASGD, which read numbers."""
    if name == "SparseAdam":
        pytest.skip("its gradients are sparse: test_sparse_gradients.py")
    cls: Any = getattr(torch.optim, name)

    def start() -> nn.Module:
        return model(bias=name != "Muon")

    for lr in (None, LR):
        expected = by_hand(start(), (lambda _: True, cls, lr))
        given = {} if lr is None else {"lr": lr}
        assert_resumes(lambda: pl.optim.from_torch(cls, **given), expected, start, points=[0, 3])


@pytest.mark.parametrize("options", [{}, {"donate": False}, {"strict": True}, {"watch": {Event.BATCH_END}}], ids=str)
def test_classes_that_add_to_their_group_in_the_first_step_resume(options: dict[str, Any]) -> None:
    """``group["step"] = group.get("step", 0) + 1``, and an optimizer state that is made then, too."""
    expected = by_hand(model(), (lambda _: True, AddsInTheFirstStep, None))
    points = range(BATCHES) if not options else [1]
    assert_resumes(lambda: pl.optim.from_torch(AddsInTheFirstStep), expected, points=points, **options)


def test_keys_that_are_removed_stay_so() -> None:
    expected = by_hand(model(), (lambda _: True, RemovesAKey, None))
    assert_resumes(lambda: pl.optim.from_torch(RemovesAKey), expected, points=[0, 1, 2, 3])


@pytest.mark.parametrize("kind", tiers(scripted.KINDS, {"growing tensor", "deque", "none or number", "dict"}))
def test_values_of_each_kind_resume(kind: str) -> None:
    """In each place: the group, the state of a parameter, shared state, an attribute; from the first step or later."""
    script = [(first, 4, place, kind) for first, place in zip((1, 2, 1, 2), scripted.PLACES, strict=True)]
    options: dict[str, Any] = {"script": tuple(script)}
    expected = by_hand(model(), (lambda _: True, lambda p: Scripted(p, **options), None))
    assert_resumes(lambda: pl.optim.from_torch(Scripted, **options), expected, points=[0, 2, 3])


def test_random_numbers_of_a_class_are_seeded_by_the_run() -> None:
    """The global generators don't matter, also NumPy's and Python's."""
    expected = by_hand(model(), (lambda _: True, lambda p: Scripted(p, draws=True), None))
    torch.manual_seed(5)
    assert_resumes(lambda: pl.optim.from_torch(Scripted, draws=True), expected, points=[1])
    other = pl.run(fit(model(), pl.optim.from_torch(Scripted, draws=True), seed=1))
    assert not torch.equal(other.params["0.weight"], expected[0])


def test_a_tensor_in_two_places_stays_one() -> None:
    expected = by_hand(model(), (lambda _: True, lambda p: Scripted(p, alias=True), None))
    assert_resumes(lambda: pl.optim.from_torch(Scripted, alias=True), expected, points=[0, 2])


def test_groups_resume() -> None:
    """In ``partition``: a class with each behaviour, with and without schedules."""
    script = ((1, 9, "group", "tensor in place"), (3, 9, "state", "list"), (2, 3, "attribute", "tuple"))
    labels = {"0.weight": "a", "0.bias": "b", "2.weight": "c", "2.bias": "d"}
    classes: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "a": (Scripted, {"script": script}, LR),
        "b": (torch.optim.ASGD, {}, None),
        "c": (torch.optim.Adafactor, {}, LR),
        "d": (AddsInTheFirstStep, {}, None),
    }

    def make() -> pl.optim.Optimizer:
        parts = {
            key: pl.optim.from_torch(cls, **options, **({} if lr is None else {"lr": lr}))
            for key, (cls, options, lr) in classes.items()
        }
        return pl.optim.partition(parts, label=lambda name, tensor: labels[name])

    parts: list[Any] = [
        (lambda name, key=key: labels[name] == key, lambda p, cls=cls, options=options: cls(p, **options), lr)
        for key, (cls, options, lr) in classes.items()
    ]
    assert_resumes(make, by_hand(model(), *parts), points=[0, 1, 3])


step = st.integers(1, BATCHES)
writes = st.lists(
    st.tuples(step, step, st.sampled_from(scripted.PLACES), st.sampled_from(sorted(scripted.KINDS))), max_size=4
)
dense = sorted(set(OF_TORCH) - {"SparseAdam", "Muon"})


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[Any, dict[str, Any], Any]:
    """A class, its options, and a schedule or None."""
    lr = draw(st.sampled_from([None, LR]))
    if draw(st.booleans()):
        return getattr(torch.optim, draw(st.sampled_from(dense))), {}, lr
    options = {"script": tuple(draw(writes)), "draws": draw(st.booleans()), "alias": draw(st.booleans())}
    return draw(st.sampled_from([(Scripted, options, lr), (AddsInTheFirstStep, {}, lr)]))


@examples(8, 150)
@given(
    drawn=st.lists(optimizers(), min_size=1, max_size=3),
    where=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    point=st.integers(0, BATCHES - 1),
    options=st.sampled_from([{}, {"donate": False}, {"watch": {Event.BATCH_END, Event.BATCH_CHECKPOINT}}]),
)
def test_what_a_class_keeps_resumes(drawn: Any, where: list[int], point: int, options: dict[str, Any]) -> None:
    """Property: whatever a class writes, where and when, training is the class by hand, and resumes at any batch."""
    names = [name for name, _ in model().named_parameters()]
    labels = {name: str(index % len(drawn)) for name, index in zip(names, where, strict=True)}

    def make() -> pl.optim.Optimizer:
        parts = {
            str(index): pl.optim.from_torch(cls, **given, **({} if lr is None else {"lr": lr}))
            for index, (cls, given, lr) in enumerate(drawn)
        }
        return pl.optim.partition(parts, label=lambda name, tensor: labels[name])

    parts: list[Any] = [
        (lambda name, key=str(index): labels[name] == key, lambda p, cls=cls, given=given: cls(p, **given), lr)
        for index, (cls, given, lr) in enumerate(drawn)
        if str(index) in labels.values()
    ]
    expected = by_hand(model(), *parts)
    kept = [state for event, state in fit(model(), make(), **options) if event is Event.BATCH_END]
    assert_same(kept[-1].params, expected)
    assert_same(pl.run(fit(kept[point], make(), **options)).params, expected)
    with TemporaryDirectory() as folder:
        pl.save(kept[point], f"{folder}/x.safetensors")
        loaded = pl.load(f"{folder}/x.safetensors", model=model())
        assert_same(pl.run(fit(loaded, make(), **options)).params, expected)


def counting(start: int) -> Any:
    return itertools.count(start)


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value


UNHOLDABLE: dict[str, tuple[Any, str, str]] = {
    "object": (lambda p: Custom(1), "state", r"state\[param\]\['kept'\] is a tests\.optim\.test_resumption\.Custom"),
    "object in a list": (lambda p: [Custom(1)], "group", r"param_groups\[0\]\['kept'\]\[0\] is a .*Custom"),
    "attribute": (lambda p: Custom(1), "attribute", r"self\.kept is a .*Custom"),
    "iterator": (lambda p: counting(1), "attribute", r"self\.kept is a itertools\.count"),
    "default dict": (lambda p: collections.defaultdict(int), "state", r"is a collections\.defaultdict"),
    "parameter": (lambda p: p, "state", r"is a parameter of the model itself"),
    "parameter's memory": (lambda p: p.data, "state", r"shares memory with a parameter.*\.clone\(\)"),
    "keyed by parameters": (lambda p: {p: 1}, "state", r"has parameters, or their id\(\), as keys"),
    "keyed by id": (lambda p: {id(p): 1}, "attribute", r"has parameters, or their id\(\), as keys"),
    "sparse": (lambda p: torch.ones(2, 2).to_sparse(), "state", r"layout torch\.sparse_coo"),
    "generator": (lambda p: torch.Generator(), "state", r"is a torch\.?\w*\.Generator"),
}


@pytest.mark.parametrize("case", sorted(UNHOLDABLE))
def test_what_cannot_be_resumed_is_refused_at_the_call(case: str) -> None:
    make, place, says = UNHOLDABLE[case]
    with pytest.raises(ArgumentError, match=rf"from_torch\(Holds\): training .* could not be resumed: .*{says}"):
        pl.optim.from_torch(Holds, make=make, place=place)


class Groups(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__([{"params": params}, {"params": [nn.Parameter(torch.zeros(1))]}], {})


class OnParameters(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.momentum = 1


class Generators(torch.optim.Optimizer):
    """It has one of its own, which moves."""

    def __init__(self, params: Any, generator: Any) -> None:
        super().__init__(params, {})
        self.generator = generator()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.rand(2, generator=self.generator)


def test_other_things_that_cannot_be_resumed() -> None:
    with pytest.raises(ArgumentError, match=r"made 2 parameter groups.*partition"):
        pl.optim.from_torch(Groups)
    with pytest.raises(ArgumentError, match="it sets attributes on the parameters: momentum"):
        pl.optim.from_torch(OnParameters)
    with pytest.raises(ArgumentError, match=r"self\.generator is a torch\S*Generator"):
        pl.optim.from_torch(Generators, generator=torch.Generator)


class Plain(torch.optim.Optimizer):
    """It refers to parameters, functions, loggers and settings that never change: nothing of it is kept."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.listed, self.log, self.made = list(self.param_groups[0]["params"]), logging.getLogger("x"), Custom(3)
        self.scale = lambda: 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.listed:
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"] * self.scale())


def test_references_to_parameters_are_those_of_each_step() -> None:
    """A copy of ``self.listed`` would be updated in the place of the parameters."""
    expected = by_hand(model(), (lambda _: True, Plain, None))
    assert_resumes(lambda: pl.optim.from_torch(Plain), expected, points=[1])
    state = pl.run(fit(model(), pl.optim.from_torch(Plain)))
    assert not state.opt_state["attributes"]


class Late(torch.optim.Optimizer):
    """What can't be kept comes in the fourth step, after every trial."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 4:
            self.projector = Custom(1)


def test_what_comes_later_is_refused_then() -> None:
    states = []
    with pytest.raises(ArgumentError, match=r"self\.projector is a .*Custom"):
        states.extend(state for event, state in fit(model(), pl.optim.from_torch(Late)) if event is Event.BATCH_END)
    assert len(states) == 3


@pytest.mark.parametrize("wrapped", [False, True])
def test_states_of_others_are_refused(wrapped: bool) -> None:
    """By name: another class, other options, other parameters, other shapes."""

    def optimizer(cls: Any, **options: Any) -> pl.optim.Optimizer:
        made = pl.optim.from_torch(cls, **options)
        return pl.optim.partition({"all": made}, label=lambda name, tensor: "all") if wrapped else made

    state = pl.run(fit(model(), optimizer(torch.optim.Adam), watch={Event.BATCH_END}))

    def refused(start: pl.State, cls: Any, says: str, **options: Any) -> None:
        with pytest.raises(ResumeError, match=says):
            fit(start, optimizer(cls, **options))

    refused(
        state, torch.optim.AdamW, r"another optimizer than from_torch\(AdamW\): by from_torch of 'torch\.optim.*Adam'"
    )
    refused(state, torch.optim.Adam, "with other options.*needs.*max_exp_avg_sq", amsgrad=True)
    wider = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4))
    refused(state.with_module(wider), torch.optim.Adam, "doesn't fit .* a step from it fails")
    longer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4))
    refused(state.with_module(longer), torch.optim.Adam, "for another model: it is that of other parameters")
    other = pl.run(fit(model(), pl.optim.adamw(lr=0.1), watch={Event.BATCH_END}))
    refused(other, torch.optim.Adam, "another optimizer")


def test_an_init_that_reads_numbers_resumes() -> None:
    """An optimizer of the user's own: ``init`` was called on the meta device, where there are none."""

    def init(params: Any) -> Any:
        return pl.FrozenDict(norms=pl.FrozenDict({name: float(p.norm()) for name, p in params.items()}))

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        return pl.FrozenDict(
            {name: p - 0.1 * memory["norms"][name] * grads[name] for name, p in params.items()}
        ), memory

    own = pl.optim.Optimizer(name="own", init=init, update=update, lr=lambda timestamp: 0.1)
    kept = [state for event, state in fit(model(), own) if event is Event.BATCH_END]
    assert_same(pl.run(fit(kept[1], own)).params, list(kept[-1].params.values()))
    with pytest.raises(ResumeError, match="another optimizer than adamw"):
        fit(kept[1], pl.optim.adamw(lr=0.1))


THIRD_PARTY = (
    *("Lamb", "SOAP", "Shampoo", "Adan", "Lion", "AdaBelief", "RAdam", "Ranger", "Prodigy", "DAdaptAdam"),
    *("ScheduleFreeAdamW", "AdamP", "AdaShift", "Kron", "CAME", "AdEMAMix", "MADGRAD", "Tiger", "SPAM", "GaLore"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", THIRD_PARTY)
def test_classes_of_pytorch_optimizer_resume(name: str) -> None:
    cls: Any = getattr(pytest.importorskip("pytorch_optimizer.optimizer"), name)
    for lr in (None, LR):
        expected = by_hand(model(), (lambda _: True, cls, lr))
        given = {} if lr is None else {"lr": lr}
        assert_resumes(lambda: pl.optim.from_torch(cls, **given), expected, points=[0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit", "AdEMAMix8bit"])
def test_classes_of_bitsandbytes_resume(name: str, tmp_path: Path) -> None:
    cls: Any = getattr(pytest.importorskip("bitsandbytes").optim, name)
    options = {"lr": 0.01, "min_8bit_size": 8}  # so that the weights here have their state in 8 bits, too
    expected = by_hand(model(), (lambda _: True, lambda p: cls(p, **options), None))
    assert_resumes(lambda: pl.optim.from_torch(cls, **options), expected, points=[0, 2])
    state = pl.run(fit(model(), pl.optim.from_torch(cls, **options)))
    assert state.opt_state["memory"]["0.weight"]["state1"].dtype is torch.uint8


class WritesItsOptions(torch.optim.Optimizer):
    """Each step puts equal values in the places of its options."""

    def __init__(self, params: Any, lr: float = 0.1, betas: Any = (0.5, 0.5)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["betas"] = (*group["betas"],)
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] * group["betas"][0])


def test_options_are_those_of_the_call_that_resumes() -> None:
    kept = [state for event, state in fit(model(), pl.optim.from_torch(WritesItsOptions)) if event is Event.BATCH_END]
    assert not kept[-1].opt_state["group"]
    resumed = pl.run(fit(kept[3], pl.optim.from_torch(WritesItsOptions, betas=(0.0, 0.5))))
    assert_same(resumed.params, list(kept[3].params.values()))
