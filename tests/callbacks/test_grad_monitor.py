"""GradMonitor against a plain loop: norms, ratios and cosines, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.callbacks import GradMonitor
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import LR, cross_entropy, equal, mlp, points, train
from tests.support.worlds import KINDS, pool

LIMIT = 0.05
DATA = points(batches=3, size=4)
OF_ALL = (
    *("gradients/norm", "gradients/norm_before_clipping", "parameters/norm"),
    *("updates/norm", "updates/ratio", "updates/cosine"),
)


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm())


def by_hand(limit: float | None = LIMIT, weight_decay: float = 0.0) -> list[dict[str, float]]:
    """What a plain loop measures at each batch."""
    module, found = mlp(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, weight_decay=weight_decay)
    for inputs, targets in DATA:
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        named = dict(module.named_parameters())
        unclipped = norm(p.grad for p in named.values())
        if limit is not None:
            nn.utils.clip_grad_norm_(module.parameters(), limit)
        before = {name: p.detach().clone() for name, p in named.items()}
        optimizer.step()
        updates = {name: p.detach() - before[name] for name, p in named.items()}
        values = {
            "gradients/norm": norm(p.grad for p in named.values()),
            "gradients/norm_before_clipping": unclipped,
            "parameters/norm": norm(named.values()),
            "updates/norm": norm(updates.values()),
        }
        products = sum(float((updates[name] * p.grad).double().sum()) for name, p in named.items())
        values["updates/cosine"] = products / values["updates/norm"] / values["gradients/norm"]
        for name, p in named.items():
            values |= {f"gradients/norm/{name}": norm([p.grad]), f"parameters/norm/{name}": norm([p])}
            values[f"updates/norm/{name}"] = norm([updates[name]])
            values[f"updates/ratio/{name}"] = norm([updates[name]]) / norm([p])
        values["updates/ratio"] = values["updates/norm"] / values["parameters/norm"]
        found.append(values)
    return found


def measured(monitor: GradMonitor, **options: Any) -> tuple[dict[int, dict[str, float]], pl.State]:
    """What is recorded by batch, but for what fit records itself; and the last State."""
    logger = InMemoryLogger()
    settings = {"max_duration": "1ep", "clip_grad": LIMIT, "strict": False, **options}
    state = train(mlp(), DATA, callbacks=[monitor], loggers=[logger], **settings)
    found: dict[int, dict[str, float]] = {}
    for name in logger.metrics:
        if not name.startswith("train/"):
            for batch, value in zip(*logger.series(name), strict=True):
                found.setdefault(batch, {})[name] = value
    return found, state


WAYS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "strict": {"strict": True},
    "microbatches": {"microbatch_size": 3},
    "every State donated": {"donate": True},
    "no donation": {"donate": False},
    "one event watched": {"watch": {pl.Event.EPOCH_END}},
    "compiled": {"compile": True},
    "clipped by an algorithm": {"clip_grad": None, "algorithms": [pl.algorithms.gradient_clipping("norm", LIMIT)]},
    "order of 2021": {"order": "2021"},
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_a_plain_loop(way: str, interpreted: None) -> None:
    found, _ = measured(GradMonitor("1ba", per_layer=True), **WAYS[way])
    expected = by_hand()
    assert list(found) == [1, 2, 3]
    for batch, values in enumerate(expected, 1):
        assert found[batch] == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_plain_gradient_descent_has_a_cosine_of_minus_one() -> None:
    found, _ = measured(GradMonitor("1ba"), clip_grad=None)
    assert {name: [values[name] for values in found.values()] for name in ("updates/cosine",)} == {
        "updates/cosine": pytest.approx([-1.0] * 3, abs=1e-5)
    }
    assert all(values["gradients/norm"] == values["gradients/norm_before_clipping"] for values in found.values())


@pytest.mark.parametrize("kind", ["value", "adaptive"])
def test_the_norm_before_clipping_is_known_whatever_clips(kind: str) -> None:
    clipping = pl.algorithms.gradient_clipping(kind, 0.001)
    found, _ = measured(GradMonitor("1ba"), clip_grad=None, algorithms=[clipping])
    first = found[1]
    assert first["gradients/norm_before_clipping"] == pytest.approx(by_hand(None)[0]["gradients/norm"], rel=1e-4)
    assert first["gradients/norm"] < 0.1 * first["gradients/norm_before_clipping"]


def test_groups_are_left_out() -> None:
    everything, _ = measured(GradMonitor("1ba"), optimizer=pl.optim.adam(lr=LR))
    assert everything[1].keys() == {*OF_ALL, "moments/norm/exp_avg", "moments/norm/exp_avg_sq"}
    for group in ("gradients", "parameters", "updates", "moments"):
        flags: dict[str, Any] = {group: False}
        found, _ = measured(GradMonitor("1ba", **flags), optimizer=pl.optim.adam(lr=LR))
        assert found[1] == {
            name: pytest.approx(value) for name, value in everything[1].items() if not name.startswith(f"{group}/")
        }


OPTIMIZERS: dict[str, Any] = {
    "adam": (pl.optim.adam(lr=LR), {"exp_avg": 0.1, "exp_avg_sq": None}),
    "of torch": (pl.optim.from_torch(torch.optim.SGD, lr=LR, momentum=0.9), {"momentum_buffer": 1.0}),
    "momentum": (pl.optim.sgd(lr=LR, momentum=0.9), {"momentum_buffer": 1.0}),
    "no momentum": (pl.optim.sgd(lr=LR), {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments(name: str) -> None:
    optimizer, factors = OPTIMIZERS[name]
    found, _ = measured(GradMonitor("1ba"), optimizer=optimizer)
    recorded = {key.removeprefix("moments/norm/"): value for key, value in found[1].items() if "moments" in key}
    assert recorded.keys() == factors.keys()
    for key, factor in factors.items():
        if factor is not None:  # after one step a moment is a multiple of the gradient
            assert recorded[key] == pytest.approx(factor * found[1]["gradients/norm"], rel=1e-4)


def test_it_records_at_its_interval() -> None:
    data = points(batches=5, size=2)
    even = [2, 4, 6, 8, 10]
    batches = {"2ba": even, "3ba": [3, 6, 9], "0.2dur": even, "1ep": [6], "4sp": [3, 5, 7, 9]}
    for interval, expected in batches.items():
        logger = InMemoryLogger()
        train(mlp(), data, callbacks=[GradMonitor(interval)], loggers=[logger])
        assert logger.series("gradients/norm")[0] == expected, interval
    logger = InMemoryLogger()
    monitor = GradMonitor(lambda state: state.timestamp.batch % 4 == 3)
    train(mlp(), data, callbacks=[monitor], loggers=[logger])
    assert logger.series("updates/norm")[0] == [3, 7]


UNCLIPPED: list[dict[str, Any]] = [
    *({}, {"compile": True}, {"microbatch_size": 3}, {"watch": {pl.Event.BATCH_END}}, {"order": "2021"}),
    {"compile": True, "watch": {pl.Event.BATCH_END}, "microbatch_size": 2},
]


@pytest.mark.parametrize("options", UNCLIPPED, ids=str)
def test_the_norm_is_in_the_state_at_every_batch(options: dict[str, Any], interpreted: None) -> None:
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=LR), "max_duration": "1ep"}
    states = pl.fit(mlp(), DATA, callbacks=[GradMonitor()], **settings, **options)
    found = [state.grad_norm for event, state in states if event is pl.Event.BATCH_END]
    assert torch.stack(found).tolist() == pytest.approx([v["gradients/norm"] for v in by_hand(None)], rel=1e-4)


def test_a_parameter_without_a_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)  # type: ignore[no-any-return]

    logger = InMemoryLogger()
    train(Half(), DATA, callbacks=[GradMonitor("1ba", per_layer=True)], loggers=[logger], max_duration="1ba")
    assert "gradients/norm/unused.weight" not in logger.metrics
    assert logger.series("updates/norm/unused.weight")[1] == [0.0]
    assert logger.series("updates/cosine")[1] == pytest.approx([-1.0], abs=1e-5)


def test_sparse_gradients_and_halves() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    data = [(torch.tensor([[0, 1], [1, 5]]), torch.tensor([0, 2]))]
    logger = InMemoryLogger()
    settings: dict[str, Any] = {"callbacks": [GradMonitor("1ba", per_layer=True)], "max_duration": "1ba"}
    optimizer = pl.optim.from_torch(torch.optim.SGD, lr=LR)
    train(model, data, loggers=[logger], optimizer=optimizer, **settings)
    assert logger.series("updates/cosine")[1] == pytest.approx([-1.0], abs=1e-5)
    assert logger.series("updates/norm/0.weight")[1][0] > 0
    logger = InMemoryLogger()
    train(mlp().to(torch.bfloat16), [(x.bfloat16(), y) for x, y in DATA], loggers=[logger], **settings)
    (_, value), *_ = logger.metrics["gradients/norm/0.weight"]
    assert value.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_values_are_those_of_one(kind: str) -> None:
    expected, _ = measured(GradMonitor("1ba", per_layer=True), optimizer=pl.optim.adam(lr=LR))

    def program(rank: int) -> dict[int, dict[str, float]]:
        return measured(
            GradMonitor("1ba", per_layer=True), optimizer=pl.optim.adam(lr=LR), parallel=kind, strict=rank < 0
        )[0]

    first, second = pool(kind=kind).run(program)
    assert second == {}
    for batch, values in expected.items():
        assert first[batch] == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_a_callback_that_needs_the_norm_runs_on_all_ranks() -> None:
    class Alone(pl.Callback):
        needs_grad_norm = True

        def batch_end(self, state: pl.State, logger: Any) -> None: ...

    with pytest.raises(pl.ArgumentError, match="Alone has needs_grad_norm = True, and not all_ranks = True"):
        train(mlp(), DATA, callbacks=[Alone()])


def test_training_is_what_it_was() -> None:
    for options in ({}, {"donate": True}, {"microbatch_size": 2}, {"optimizer": pl.optim.adamw(lr=LR)}):
        for limit in (None, LIMIT):
            settings: dict[str, Any] = {"clip_grad": limit, "strict": False, "max_duration": "1ep", **options}
            _, state = measured(GradMonitor("2ba", per_layer=True), **settings)
            alone = train(mlp(), DATA, **settings)
            equal((state.params, state.opt_state), (alone.params, alone.opt_state))
