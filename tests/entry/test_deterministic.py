"""``deterministic=True``: torch's switches are set while a stream computes and never in the body of the loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.entry.deterministic import refuse_cublas
from pure_loop.errors import ArgumentError, ArgumentTypeError, NondeterministicError

mse = nn.functional.mse_loss
DATA = [(torch.ones(2, 3), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]


def switches() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


SET = (True, False, True, False)


@pytest.fixture(params=[(False, False, False, True), (True, True, False, True), (False, False, True, False)])
def surroundings(request: pytest.FixtureRequest) -> Iterator[tuple[bool, ...]]:
    before = switches()

    def put(values: tuple[bool, ...]) -> None:
        torch.use_deterministic_algorithms(values[0], warn_only=values[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = values[2], values[3]

    put(request.param)
    yield request.param
    put(before)


class Sees(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 1), seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Sees:
        copied = Sees(self.seen)
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(switches())
        return self.layer(x)  # type: ignore[no-any-return]


def settings(**options: Any) -> dict[str, Any]:
    return {"loss": mse, "optimizer": pl.optim.adamw(0.01), "max_duration": "2ep", **options}


def streams(seen: list[Any], deterministic: bool) -> Iterator[Any]:
    """Each kind of stream, over code that notes the switches."""

    @pl.algorithm(Event.BATCH_START, Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START)
    def algorithm(state: pl.State) -> pl.State:
        seen.append(switches())
        return state

    def callback(event: Event, state: pl.State) -> None:
        seen.append(switches())

    def script(state: pl.State) -> Any:
        seen.append(switches())
        return (yield Event.BATCH_START, state)

    model = Sees(seen)
    run: dict[str, Any] = {"algorithms": [algorithm], "callbacks": [callback], "deterministic": deterministic}
    yield pl.fit(model, DATA, evaluators=DATA, **settings(), **run)
    yield pl.fit(model, DATA, watch={Event.BATCH_END}, **settings(), **run)
    yield pl.fit(model, DATA, strict=True, **settings(), **run)
    yield pl.evaluate(model, DATA, loss=mse, **run)
    yield pl.predict(model, DATA, **run)
    yield pl.drive(script(pl.State.create(model)), **run)


def test_switches_are_set_while_a_stream_computes_alone(surroundings: tuple[bool, ...]) -> None:
    for deterministic in (True, False):
        seen: list[Any] = []
        for stream in streams(seen, deterministic):
            assert switches() == surroundings
            for _ in stream:
                assert switches() == surroundings
            assert switches() == surroundings
            assert seen
            assert set(seen) == {SET if deterministic else surroundings}


def test_a_stream_that_is_left_leaves_the_switches(surroundings: tuple[bool, ...]) -> None:
    closed: list[Any] = []

    class Closing(pl.Callback):
        def fit_end(self, state: pl.State, logger: Any) -> None: ...

        def close(self) -> None:
            closed.append(switches())

    for number in range(8):
        stream = pl.fit(nn.Linear(3, 1), DATA, callbacks=[Closing()], deterministic=True, **settings())
        for _ in range(number):
            next(stream)
        stream.close()
        assert switches() == surroundings
    stream = pl.fit(nn.Linear(3, 1), DATA, callbacks=[Closing()], deterministic=True, **settings())
    next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError("x"))
    assert switches() == surroundings
    assert set(closed) <= {SET, surroundings}


def test_the_numbers_are_the_same_and_memory_is_donated_all_the_same() -> None:
    """On a CPU every operation here is deterministic; the loop variable is seen through what sets the switches."""
    model = nn.Linear(200, 200)
    data = [(torch.ones(2, 200), torch.zeros(2, 200))] * 4
    places: dict[bool, list[int]] = {}
    last = {}
    for deterministic in (False, True):
        places[deterministic] = []
        for event, state in pl.fit(model, data, deterministic=deterministic, **settings()):
            if event is Event.BATCH_END:
                places[deterministic].append(state.params["weight"].data_ptr())
        last[deterministic] = state
        del state
        gc.collect()
    assert torch.equal(last[True].params["weight"], last[False].params["weight"])
    assert len(set(places[False][2:])) == 1
    assert len(set(places[True][2:])) == 1


class Unpools(nn.Module):
    """Unpooling has no deterministic implementation, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2)


class Itself(Unpools):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))


IMAGES = [(torch.rand(2, 1, 4, 4), torch.zeros(2, 1, 4, 4))] * 2


def test_an_operation_without_an_implementation_is_named(surroundings: tuple[bool, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(), Unpools()))
    state = pl.State.create(model)
    says = (
        r"deterministic=True: the operation max_unpooling2d\S* has no deterministic implementation on this device, and "
        r"ran in module '1\.1' \(Unpools\)\. Use another operation there, or fit\(\.\.\., deterministic=False\)"
    )
    with pytest.raises(NondeterministicError, match=says) as caught:
        pl.run(pl.fit(model, IMAGES, deterministic=True, **settings()))
    assert isinstance(caught.value, RuntimeError)
    assert "use_deterministic_algorithms" in str(caught.value.__cause__)
    assert switches() == surroundings
    with pytest.raises(NondeterministicError, match=r"ran in module '1\.1'"):
        pl.run(pl.predict(state, IMAGES, deterministic=True))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return Unpools.forward(None, outputs).mean()  # type: ignore[arg-type]

    with pytest.raises(NondeterministicError, match=r"outside of the forward of a module"):
        pl.run(pl.fit(nn.Conv2d(1, 1, 1), IMAGES, deterministic=True, **settings(loss=loss)))
    with pytest.raises(NondeterministicError, match=r"ran in the model \(Itself\)"):
        pl.run(pl.predict(Itself(), IMAGES, deterministic=True))
    assert switches() == surroundings


def test_other_errors_stay_themselves() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        pl.run(pl.fit(nn.Linear(3, 1), DATA, deterministic=True, **settings(loss=loss)))
    assert type(caught.value) is RuntimeError


def test_bad_input() -> None:
    with pytest.raises(ArgumentTypeError, match="deterministic"):
        pl.fit(nn.Linear(3, 1), DATA, deterministic="yes", **settings())
    says = r"deterministic=True on cuda:0: cuBLAS .*CUBLAS_WORKSPACE_CONFIG=:4096:8 .* it is None.*before Python starts"
    with pytest.raises(ArgumentError, match=says):
        refuse_cublas(torch.device("cuda", 0), {})
    refuse_cublas(torch.device("cuda", 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    refuse_cublas(torch.device("cpu"), {})
