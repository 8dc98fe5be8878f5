"""Any optimizer of torch's as one of ours: the same numbers, and what can't be one is refused."""

from __future__ import annotations

import math
import threading
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import schedules
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.optim import from_torch
from pure_loop.time import Timestamp
from tests.support.optimizing import DTYPES, assert_equal, assert_same, batches, named, ours, tensors, theirs

CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"momentum_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 1, "lambd": 0.1}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_from_torch_is_the_class(cls: type[torch.optim.Optimizer], options: dict[str, Any], scheduled: bool) -> None:
    fused = options.get("fused", False)
    lr = schedules.linear(0.5, 0.1, "3ba")
    for dtype in DTYPES:
        # Adafactor divides by the number of elements.
        start = tensors(3, dtype)[:-1]
        steps: list[list[Tensor | None]] = [list(grads[:-1]) for grads in batches(3, dtype, 5)]
        if not fused:
            steps[0][1] = steps[2][1] = steps[3][2] = None
        results = ours(from_torch(cls, **options, **({"lr": lr} if scheduled else {})), start, steps)
        assert_equal(results, theirs(lambda p: cls(p, **options), start, steps, lr if scheduled else None))
        structures = {str(optree.tree_structure(state, namespace="pure_loop")) for _, state in results}
        assert len(structures) == 1


@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_from_torch_overwrites_with_the_same_numbers(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    optimizer = from_torch(cls, **options)
    if cls is torch.optim.Adafactor:  # which writes to gradients
        assert optimizer.overwrite is None
        return
    assert optimizer.overwrite is not None
    # Torch's fused SGD leaves out whole blocks of half-precision numbers, and what is in them then is anything.
    for dtype in DTYPES[:2] if options.get("fused") else DTYPES:
        start = tensors(3, dtype)[:-1]
        steps: list[list[Tensor | None]] = [list(grads[:-1]) for grads in batches(3, dtype, 5)]
        if not options.get("fused", False):
            steps[1][1] = steps[3][2] = None
        expected = ours(optimizer, start, steps)
        params, memory = named([each.clone() for each in start]), expected[0][1]
        memory = optree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, memory, namespace="pure_loop"
        )
        for batch, (grads, (values, state)) in enumerate(zip(steps, expected[1:], strict=True)):
            given, versions = params, [None if grad is None else grad._version for grad in grads]
            places = [tensor.data_ptr() for tensor in params.values()]
            params, memory = optimizer.overwrite(named(grads), memory, params, Timestamp(batch=batch))
            assert_same(dict(params), dict(values))
            assert_same(memory, state)
            assert [None if grad is None else grad._version for grad in grads] == versions
            assert not any(tensor.requires_grad for tensor in params.values())
            assert params is given
            assert [tensor.data_ptr() for tensor in params.values()] == places


def test_a_class_that_writes_to_gradients_where_it_chooses_other_kernels_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Writes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"] if self.defaults["foreach"] else ():
                param.grad.mul_(2)
            super().step()

    monkeypatch.setattr(Writes, "__module__", "torch.optim.writes")
    assert from_torch(Writes).overwrite is None
    assert from_torch(Writes, foreach=False).overwrite is not None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_gradient_that_is_not_finite_shows_in_the_parameters(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], wrong: float
) -> None:
    optimizer = from_torch(cls, **options)
    assert optimizer.spreads_nonfinite == (cls not in (torch.optim.Rprop, torch.optim.Adafactor))
    for batch in range(4) if optimizer.spreads_nonfinite else ():
        steps = batches(7, torch.float32, batch + 1)
        for grad in steps[batch][:-1]:
            grad.view(-1)[-1] = wrong
        params, _ = ours(optimizer, tensors(3, torch.float32)[:-1], [step[:-1] for step in steps])[-1]
        assert not any(tensor.isfinite().all() for tensor in params.values()), batch


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_from_torch_takes_a_class_for_matrices() -> None:
    start, *steps = [tensors(i, torch.float32, [(4, 6), (6, 3)]) for i in range(4)]
    assert_equal(ours(from_torch(torch.optim.Muon), start, steps), theirs(torch.optim.Muon, start, steps))


def test_from_torch_takes_sparse_gradients() -> None:
    start, *steps = [tensors(i, torch.float32, [(4, 2)]) for i in range(4)]
    sparse = [
        [(grad * (torch.arange(4) != i).unsqueeze(1)).to_sparse(1) for grad in grads] for i, grads in enumerate(steps)
    ]
    mine = from_torch(torch.optim.SparseAdam, lr=0.1)
    assert_equal(ours(mine, start, sparse), theirs(lambda p: torch.optim.SparseAdam(p, lr=0.1), start, sparse))


class Remembers(torch.optim.Optimizer):
    """It changes a group option, an attribute, a buffer of its own, shared state, and the gradient it is given."""

    def __init__(self, params: Any, lr: float = 0.1, d: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": d, "history": [0.0]})
        self.calls, self.total = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["all"] = {"count": self.state.get("all", {}).get("count", 0) + 1}
        for group in self.param_groups:
            group["d"] *= 1.5
            group["history"].append(group["d"])
            for p in group["params"]:
                if p.grad is not None:
                    self.total += p.grad.sum()
                    p.grad.mul_(2.0)
                    scale = self.calls + self.total.tanh() + sum(group["history"]) + self.state["all"]["count"]
                    p.sub_(p.grad, alpha=group["lr"] * group["d"] * float(scale))


def test_from_torch_keeps_what_an_optimizer_keeps_outside_its_state() -> None:
    start, steps = tensors(3, torch.float64), batches(3, torch.float64, 5)
    results = ours(from_torch(Remembers), start, steps)
    assert_equal(results, theirs(Remembers, start, steps))
    before = optree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, results[2], namespace="pure_loop"
    )
    # Another run in between, and one in another thread, leave nothing behind.
    mine = from_torch(Remembers)
    first = ours(mine, start, steps)
    threads = [threading.Thread(target=ours, args=(mine, tensors(i, torch.float64), steps)) for i in range(2)]
    for thread in threads:
        thread.start()
    second = ours(mine, start, steps)
    for thread in threads:
        thread.join()
    assert_same(first, second)
    assert_same(results, second)
    # Going on from the middle gives the rest of the run.
    params, state = results[2]
    for batch in (2, 3, 4):
        params, state = mine.update(named(steps[batch]), state, params, Timestamp(batch=batch))
    assert_same((params, state), results[5])
    assert_same(results[2], before)
    assert state["group"]["d"] == 1.5**5
    assert state["attributes"]["calls"] == 5


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"


def test_from_torch_refuses_at_the_door() -> None:
    with pytest.raises(ArgumentError, match=r"LBFGS can't be used, because LBFGS\.step\(closure\) runs the model"):
        from_torch(torch.optim.LBFGS)
    with pytest.raises(ArgumentError, match=r"NeedsClosure can't be used.*AssertionError: a closure is needed"):
        from_torch(NeedsClosure)
    with pytest.raises(ArgumentError, match=r"AdamW.*failed.*Invalid"):
        from_torch(torch.optim.AdamW, betas=(1.5, 0.9))
    with pytest.raises(ArgumentError, match="unexpected keyword"):
        from_torch(torch.optim.AdamW, learning_rate=0.1)
    with pytest.raises(ArgumentError, match="lr must be a finite number of at least 0"):
        from_torch(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ArgumentTypeError, match=r"subclass of torch\.optim.Optimizer"):
        from_torch(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="give the class"):
        from_torch(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]


def test_from_torch_shows_its_rate() -> None:
    assert from_torch(torch.optim.RMSprop).lr(Timestamp()) == 1e-2
    assert from_torch(torch.optim.SGD, lr=0.3).lr(Timestamp()) == 0.3
    assert from_torch(torch.optim.SGD, lr=schedules.linear(1, 0, "2ba")).lr(Timestamp(batch=1)) == 0.5
    assert math.isnan(from_torch(NoRate).lr(Timestamp()))
    with pytest.raises(ArgumentError, match="unexpected keyword"):
        from_torch(NoRate, lr=schedules.constant(1.0))


class RateIsATensor(torch.optim.SGD):
    """As torchao's classes have it, it takes no number in its place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["lr"] = torch.tensor(lr)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert isinstance(self.param_groups[0]["lr"], Tensor)
        super().step()


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    start, steps = tensors(3, torch.float32), batches(3, torch.float32, 5)
    lr = schedules.linear(0.5, 0.1, "3ba")
    expected = theirs(lambda p: torch.optim.SGD(p, lr=0.1), start, steps, lr)
    results = ours(from_torch(RateIsATensor, lr=lr), start, steps)
    for (params, _), other in zip(results, expected, strict=True):
        torch.testing.assert_close(list(params.values()), other)


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any, lr_: float = 1.0) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("name", ["RMSprop", "Rprop", "SGD"])
def test_from_torch_is_traced(name: str, interpreted: None) -> None:
    """In a graph, too, what it keeps are tensors, of a class of torch's own."""
    model = torch.nn.Linear(3, 2)
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(3)]
    states = [
        pl.run(
            pl.fit(
                *(model, data),
                loss=torch.nn.functional.mse_loss,
                optimizer=from_torch(getattr(torch.optim, name), lr=0.01),
                max_duration="1ep",
                watch={pl.Event.BATCH_END},
                compile=compiled,
            )
        )
        for compiled in (False, True)
    ]
    for value, other in zip(*[state.params.values() for state in states], strict=True):
        torch.testing.assert_close(value, other)
