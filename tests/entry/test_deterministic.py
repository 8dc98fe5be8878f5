"""``deterministic=True``: torch's switches are set while a stream computes and never in the body of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.entry.deterministic import refuse_cublas
from pure_loop.errors import ArgumentError, NondeterministicError
from tests.support.problem import cross_entropy, fit, mlp, points, run

DATA = points(2)
SET = (True, False, True, False)
ON: dict[str, Any] = {"deterministic": True, "strict": None}


def switches() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, cudnn.deterministic, cudnn.benchmark


def put(values: tuple[bool, ...]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = values[2:]


@contextmanager
def surroundings(values: tuple[bool, ...]) -> Iterator[None]:
    """The switches around a run, which are as they were in its body and after it."""
    before = switches()
    put(values)
    try:
        yield
        assert switches() == values
    finally:
        put(before)


def streams(note: Any, **options: Any) -> Iterator[Any]:
    """Each kind of stream, over code that notes the switches: its forward, algorithms, callbacks and scripts."""

    def look(*_: Any) -> None:
        note(switches())

    @pl.algorithm(Event.BATCH_START, Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START)
    def algorithm(state: pl.State) -> pl.State:
        look()
        return state

    def script(state: pl.State) -> Any:
        look()
        return (yield Event.BATCH_START, state)

    model = mlp()
    model.register_forward_pre_hook(look)
    options |= {"algorithms": [algorithm], "callbacks": [look]}
    yield fit(model, DATA, evaluators=DATA, watch={Event.BATCH_END, Event.EVAL_END}, strict=None, **options)
    yield pl.evaluate(model, DATA, loss=cross_entropy, **options)
    yield pl.predict(model, DATA, **options)
    yield pl.drive(script(pl.State.create(model)), **options)


@pytest.mark.parametrize("around", [(False, False, False, True), (True, True, False, True)])
def test_switches_are_set_while_a_stream_computes_alone(around: tuple[bool, ...]) -> None:
    """A stream that is left leaves them, too."""
    seen: list[Any] = []
    for deterministic in (True, False):
        with surroundings(around):
            for stream in streams(seen.append, deterministic=deterministic):
                for _ in stream:
                    assert switches() == around
                assert switches() == around
                assert set(seen) == {SET if deterministic else around}
                seen.clear()
    closing: Any = type(
        "Closing", (pl.Callback,), {"fit_end": lambda *_: 0, "close": lambda _: seen.append(switches())}
    )
    with surroundings(around):
        for number in range(8):
            stream = fit(callbacks=[closing()], **ON)
            for _ in range(number):
                next(stream)
            stream.close()
            assert switches() == around
        stream = fit(callbacks=[closing()], **ON)
        next(stream)
        with pytest.raises(KeyError):
            stream.throw(KeyError("x"))
    assert set() < set(seen) <= {SET, around}
    places = []
    for _, state in fit(nn.Linear(4, 200), watch={Event.BATCH_END}, **ON):  # the variable is seen through the switches
        places.append(state.params["weight"].data_ptr())
    assert len(set(places[2:])) == 1


class Unpools(nn.Module):
    """Unpooling has no deterministic implementation, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2)


def test_an_operation_without_an_implementation_is_named_and_other_errors_stay_themselves() -> None:
    images = [(torch.rand(2, 1, 4, 4), torch.zeros(2, 1, 4, 4))] * 2
    model, mse = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(), Unpools())), nn.functional.mse_loss
    itself = Unpools()
    itself.bias = nn.Parameter(torch.zeros(1))
    says = (
        r"deterministic=True: the operation max_unpooling2d\S* has no deterministic implementation on this device, and "
        r"ran in module '1\.1' \(Unpools\)\. Use another operation there, or fit\(\.\.\., deterministic=False\)"
    )
    for make, where in (
        (lambda: fit(model, images, loss=mse, **ON), says),
        (lambda: pl.predict(pl.State.create(model), images, deterministic=True), r"ran in module '1\.1'"),
        (lambda: fit(model[0], images, loss=lambda o, t: Unpools.forward(None, o).mean(), **ON), "outside of the forw"),
        (lambda: pl.predict(itself, images, deterministic=True), r"ran in the model \(Unpools\)"),
    ):
        with surroundings((False, False, True, False)), pytest.raises(NondeterministicError, match=where) as caught:
            pl.run(make())
        assert "use_deterministic_algorithms" in str(caught.value.__cause__)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as other:
        run(loss=loss, **ON)
    assert type(other.value) is RuntimeError


def test_what_cublas_needs_is_asked_for() -> None:
    says = r"deterministic=True on cuda:0: cuBLAS .*CUBLAS_WORKSPACE_CONFIG=:4096:8 .* it is None.*before Python starts"
    with pytest.raises(ArgumentError, match=says):
        refuse_cublas(torch.device("cuda", 0), {})
    refuse_cublas(torch.device("cuda", 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    refuse_cublas(torch.device("cpu"), {})
