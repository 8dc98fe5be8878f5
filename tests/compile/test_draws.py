"""Random numbers that an algorithm draws in a compiled step: those of eager steps, bit for bit, in one graph."""

from __future__ import annotations

import contextvars
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import example, given
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import operations, record
from pure_loop.random.seeds import derive, generator, seeded
from tests.support import problem
from tests.support.compiling import Net, net
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("interpreted")

WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])


def drawn(function: Callable[[pl.State], Any], event: Event = Event.BATCH_END, **options: Any) -> tuple[Any, Any]:
    """What a function of the State draws at an event of each of six batches, and the parameters after them."""

    def init(state: pl.State) -> Tensor:
        return torch.zeros(6, *torch.as_tensor(function(state)).shape, dtype=torch.float64)

    def remember(state: pl.State) -> pl.State:
        before = state.algorithm_state["drawn"]
        return state.remember("drawn", torch.cat([before[1:], torch.as_tensor(function(state))[None]]))

    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    own = pl.Algorithm("drawn", {event: remember}, init=init)
    state = problem.run(model, algorithms=own, watch={Event.FIT_END}, strict=None, **options)
    return state.algorithm_state["drawn"], dict(state.params)


def same(function: Callable[[pl.State], Any], event: Event = Event.BATCH_END, **options: Any) -> None:
    found, params = drawn(function, event, **options)
    with record() as made:
        compiled, its_params = drawn(function, event, compile=True, **options)
    assert torch.equal(compiled, found)
    torch.testing.assert_close(its_params, params, rtol=0, atol=1e-6)
    assert sum(each.segment == "step" for each in made) == 1


def written() -> Tensor:
    weights = torch.ones(5)
    weights[1:3] = torch.arange(2.0)
    weights.view(5, 1)[4] *= 7
    return weights


Source = Callable[[pl.State, str], torch.Generator]
SOURCES: dict[str, Source] = {
    "each batch": lambda state, name: generator(state.seed, name, state.timestamp.batch),
    "each epoch": lambda state, name: generator(state.seed, "epoch", name, state.timestamp.epoch),
    "always": lambda state, name: generator(7, name),
}
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda **given: torch.rand(4, **given),
    "randn": lambda **given: torch.randn(3, 4, dtype=torch.float64, **given),
    "randint": lambda **given: torch.randint(9, (4,), **given),
    "randperm": lambda **given: torch.randperm(4, **given),
    "uniform_": lambda **given: torch.empty(2, 4).uniform_(1, 2, **given),
    "normal_": lambda **given: torch.ones(4, 3).t().normal_(1, 2, **given),
    "bernoulli_": lambda **given: torch.empty(4).bernoulli_(0.4, **given),
    "exponential_": lambda **given: torch.empty(4).exponential_(2, **given),
    "init": lambda **given: nn.init.xavier_normal_(torch.empty(3, 4), **given),
    "normal": lambda **given: torch.normal(0.5, 2.0, (4,), **given),
    "normal of deviations": lambda **given: torch.normal(0.1, WEIGHTS * 2, **given),
    "normal of both": lambda **given: torch.normal(WEIGHTS, WEIGHTS, **given),
    "bernoulli": lambda **given: torch.bernoulli(torch.full((4,), 0.3), **given),
    "bernoulli_ by many": lambda **given: torch.empty(4).bernoulli_(WEIGHTS, **given),
    "by what was written": lambda **given: torch.multinomial(written(), 4, **given),
    "multinomial": lambda **given: torch.multinomial(WEIGHTS, 4, replacement=True, **given),
    "poisson": lambda **given: torch.poisson(3 * WEIGHTS, **given),
    "binomial": lambda **given: torch.binomial(torch.full((4,), 5.0), WEIGHTS, **given),
}
GLOBAL: dict[str, Callable[[], Tensor]] = {
    "rand_like": lambda: torch.rand_like(WEIGHTS),
    "dropout": lambda: torch.dropout(WEIGHTS, 0.5, True),
    "beta": lambda: torch.distributions.Beta(WEIGHTS, 2.0).sample(),
    "gamma": lambda: torch.distributions.Gamma(WEIGHTS, 2.0).sample(),
    "normal": lambda: torch.distributions.Normal(0.0, WEIGHTS).rsample(),
}

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(SOURCES)), st.sampled_from("ab"), st.sampled_from(sorted(OPERATIONS))),
        st.tuples(st.just("seeded"), st.sampled_from("ab"), st.sampled_from(sorted(GLOBAL))),
    ),
    min_size=1,
    max_size=5,
)


def program(listed: list[tuple[str, str, str]], nested: bool) -> Callable[[pl.State], Tensor]:
    def draw(state: pl.State) -> Tensor:
        generators: dict[tuple[str, str], torch.Generator] = {}
        found = torch.zeros(4, dtype=torch.float64)
        outer = seeded(derive(state.seed, "outer", state.timestamp.sample)) if nested else nullcontext()
        with outer:
            for source, name, operation in listed:
                if source == "seeded":
                    with seeded(derive(state.seed, name, state.timestamp.batch)):
                        found = found * 2 + GLOBAL[operation]()
                else:
                    key = source, name
                    generators.setdefault(key, SOURCES[source](state, name))
                    drawn = OPERATIONS[operation](generator=generators[key])
                    found = found * 2 + drawn.reshape(-1, 4).sum(0)
                if nested:
                    found = found + torch.rand(4)
        return found

    return draw


EVENTS = (Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


@examples(5, 300)
@given(steps, st.sampled_from(EVENTS), st.booleans(), st.sampled_from([None, 4]))
@example([("each batch", "a", name) for name in OPERATIONS], Event.BATCH_END, False, 4)
@example([("seeded", "a", name) for name in GLOBAL], Event.AFTER_LOSS, True, None)
def test_whatever_is_drawn_is_what_eager_steps_draw(
    listed: list[tuple[str, str, str]], event: Event, nested: bool, microbatch_size: int | None
) -> None:
    same(program(listed, nested), event, microbatch_size=microbatch_size)


def by_the_batch(state: pl.State) -> Tensor:
    return torch.rand(3, generator=generator(state.seed, "x", state.timestamp.batch))


def test_seeds_are_those_of_each_step_and_run_and_of_several_steps_in_a_call() -> None:
    runs = [drawn(by_the_batch, compile=True, **options)[0] for options in ({"seed": 1}, {"steps_per_call": 4})]
    assert torch.equal(runs[1], drawn(by_the_batch)[0])
    assert len(torch.unique(torch.cat(runs), dim=0)) == 12


def drawing(self: Any, x: Tensor) -> Tensor:
    """Draws from a generator between two dropouts, by a constant, and through a distribution."""
    mean = self.one(torch.dropout(x, 0.3, self.training))
    if not self.training:
        return cast(Tensor, mean)
    z = torch.distributions.Normal(mean, self.two(mean).exp()).rsample()
    z = z + torch.rand(1, generator=generator(3, "always"))
    return torch.dropout(z, 0.3, True) * torch.bernoulli(WEIGHTS[:1])


def noisy_update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
    noise = generator(5, "own", timestamp.batch)
    new = {n: p - 0.1 * grads[n] + 0.01 * torch.randn(p.shape, generator=noise) for n, p in params.items()}
    return pl.FrozenDict(new), opt_state


@pl.algorithm(Event.EVAL_BATCH_START)
def noise(state: pl.State) -> pl.State:
    return state.replace(batch=(state.batch[0] + by_the_batch(state).sum(), state.batch[1]))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions look at their parameters; where torch.compile has run, they don't for the rest of the process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.usefixtures("checked")
def test_models_optimizers_and_evaluations_draw() -> None:
    optimizer = pl.optim.Optimizer(name="own", init=lambda _: pl.FrozenDict(), update=noisy_update, lr=lambda _: 0.1)
    given: dict[str, Any] = {"evaluators": problem.points(1), "watch": {Event.EVAL_END}, "strict": None}
    with seeded(0):
        model = net(drawing)()
    found, wanted = (problem.run(model, None, noise, optimizer=optimizer, compile=on, **given) for on in (True, False))
    torch.testing.assert_close(dict(found.params), dict(wanted.params), rtol=0, atol=1e-6)
    assert str(found.metrics) == str(wanted.metrics)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(0.0, -torch.ones(1))  # arguments are looked at as before


MODULES = (math, random, numpy.random, torch, torch.random, torch.distributions.Distribution)


def elsewhere() -> tuple[float, Any]:
    """What other code of this process draws from generators of its own, computes, and finds in modules."""
    torchs = torch.Generator().manual_seed(3)
    ours = random.Random(1).random() + numpy.random.default_rng(2).random()
    found = {f"{module.__name__}.{name}": id(value) for module in MODULES for name, value in vars(module).items()}
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(0.0, -torch.ones(1))
    return ours + float(torch.rand((), generator=torchs)) + math.cos(3), found


def attending(how: str, p: float) -> nn.Module:
    """Two tokens of two, by torch's function or by one of its modules."""
    attend, encoder = functional.scaled_dot_product_attention, partial(nn.TransformerEncoderLayer, 2, 1, 4)
    ways: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "by name": lambda self, each: attend(each, each, each, dropout_p=p),
        "by place": lambda self, each: attend(each, each, each, None, p),
        "in an encoder": lambda self, each: self.two(each),
    }
    forward = lambda self, x: self.one(ways[how](self, x.view(-1, 2, 2)).flatten(1))  # noqa: E731
    return cast(nn.Module, net(forward, None, partial(encoder, dropout=p, batch_first=True))())


def test_attention_that_drops_out_is_no_kernel_with_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a GPU has; on a CPU torch has none that drops out."""
    plain: list[bool] = []

    def noted(backend: Any) -> Any:
        plain.append(backend is SDPBackend.MATH)
        return sdpa_kernel(backend)

    def trained(model: nn.Module) -> None:
        found, wanted = (
            problem.run(model, compile=on, strict=None, watch={Event.EPOCH_END}, max_duration="1ep")
            for on in (True, False)
        )
        torch.testing.assert_close(dict(found.params), dict(wanted.params))

    monkeypatch.setattr(operations, "sdpa_kernel", noted)
    for how, p in (("by name", 0.5), ("by place", 0.5), ("in an encoder", 0.5), ("by name", 0.0)):
        plain.clear()
        with seeded(0):
            trained(attending(how, p))
        assert plain == [True] * bool(p), how
    # A segment that is run again may ask for the state of the generator.
    trained(net(lambda self, x: checkpoint(self.one, x, use_reentrant=False))())


# Several threads: one compiles after the other, and none waits for ever.

# Seconds in which threads end on a busy machine; those that wait for each other never do.
ENDS = 120.0


def in_this_context(pool: ThreadPoolExecutor, run: Any, *arguments: Any) -> Any:
    """Whether graphs are compiled or run as they are is a variable of the context."""
    return pool.submit(contextvars.copy_context().run, run, *arguments)


def weight(seeding: Any, traced: Any = lambda: None) -> torch.Tensor:
    """After training with a forward that seeds, and that calls a function when it is traced."""

    def forward(self: Net, inputs: torch.Tensor) -> torch.Tensor:
        traced()
        with seeding(3):
            out: torch.Tensor = self.one(inputs) + torch.rand(3)
            return out

    with pl.random.seeded(0):
        model = Net(forward)
    return problem.run(model, compile=True, strict=None, watch={Event.BATCH_END}).params["one.weight"]


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("seeding", [pl.random.seeded, pl.random.seeded_all])
def test_a_fit_inside_seeded_beside_a_trace_that_seeds(seeding: Any) -> None:
    """The first has the global generators, which the second waits for in its trace; that changes nothing for others."""
    tracing, waiting = threading.Event(), threading.Event()

    def traced() -> None:
        if not tracing.is_set():
            tracing.set()
            assert waiting.wait(ENDS)
            threading.Event().wait(0.5)  # until the other one waits for its turn

    def inside() -> Any:
        assert tracing.wait(ENDS)
        found = elsewhere()
        with pl.random.seeded(7):
            before = torch.rand(1).item()
            waiting.set()
            return weight(seeding), found, before, torch.rand(1).item()

    # Torch wraps some of its functions when its compiler is first imported.
    alone, state, before = weight(seeding), torch.get_rng_state(), elsewhere()
    with pl.random.seeded(7):
        expected = torch.rand(2).tolist()
    with ThreadPoolExecutor(2) as pool:
        one, other = in_this_context(pool, weight, seeding, traced), in_this_context(pool, inside)
        found, seen, *drawn = other.result(ENDS)
        assert torch.equal(one.result(ENDS), alone)
    assert torch.equal(found, alone)
    assert seen == before
    assert drawn == expected  # what other threads drew meanwhile changes nothing
    assert torch.equal(torch.get_rng_state(), state)
