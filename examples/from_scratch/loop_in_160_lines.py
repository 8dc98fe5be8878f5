"""The same with microbatches, buffers, evaluation, timestamps, callbacks, forks and blame: 160 lines of torch.

python examples/from_scratch/loop_in_160_lines.py
"""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

Batch = tuple[Tensor, Tensor]
Script = Generator[tuple[str, "State"], "State", "State"]
INSIDE_EPOCH = ("epoch_start", "batch_end", "epoch_end")
BOUNDARIES = ("", *INSIDE_EPOCH, "epoch_checkpoint")


class Timestamp(NamedTuple):
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    batch_in_epoch: int = 0

    def next_batch(self, samples: int) -> "Timestamp":
        return Timestamp(self.epoch, self.batch + 1, self.sample + samples, self.batch_in_epoch + 1)

    def next_epoch(self) -> "Timestamp":
        return Timestamp(self.epoch + 1, self.batch, self.sample, 0)


class State(NamedTuple):
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    momentum: dict[str, Tensor]
    seed: int
    timestamp: Timestamp = Timestamp()
    metrics: Mapping[str, Mapping[str, float]] = {}
    event: str = ""
    batch: Any = None  # this and the following: of the batch under way
    loss: Any = None
    grads: Any = None

    def replace(self, **changes: Any) -> "State":
        return self._replace(**changes)


class Algorithm(NamedTuple):
    name: str
    event: str
    function: Callable[[State], State]


class Task(NamedTuple):
    """What is passed again where training resumes: functions and data."""

    model: nn.Module
    batches: Callable[[int, int], Sequence[Batch]]
    loss: Callable[..., Tensor]
    lr: Callable[[Timestamp], float]
    until: Callable[[Timestamp], bool]
    momentum: float = 0.0
    microbatch_size: int | None = None
    evaluators: Mapping[str, Sequence[Batch]] = {}


def begin(model: nn.Module, seed: int) -> State:
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return State(params, buffers, {name: torch.zeros_like(param) for name, param in params.items()}, seed)


def derive(seed: int, *path: int | str) -> int:
    return int.from_bytes(blake2b(ascii((seed, *path)).encode(), digest_size=8).digest(), "little") >> 1


def shuffled(inputs: Tensor, targets: Tensor, size: int, seed: int, epoch: int) -> Sequence[Batch]:
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return [(inputs[rows], targets[rows]) for rows in torch.randperm(len(inputs), generator=generator).split(size)]


def gradients(state: State, task: Task) -> Script:
    """The gradient of a batch; a microbatch weighs as many samples as it holds."""
    inputs, targets = state.batch
    samples, size, time = len(inputs), task.microbatch_size or len(inputs), state.timestamp
    power = 2 ** (samples - 1).bit_length()  # shares are exact; one division follows
    total, mean = dict[str, Tensor](), 0.0
    for index, (x, y) in enumerate(zip(inputs.split(size), targets.split(size), strict=True)):
        leaves = {name: param.detach().requires_grad_() for name, param in state.params.items()}
        # The forward writes to these.
        buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(derive(state.seed, "forward", time.epoch, time.batch, index, 0))
            loss = task.loss(functional_call(task.model, {**leaves, **buffers}, (x,)), y)
        state = yield "after_loss", state.replace(params=leaves, buffers=buffers, loss=loss)
        share = torch.full_like(state.loss, len(x) / power)
        parts = dict(zip(leaves, torch.autograd.grad(state.loss, list(leaves.values()), share), strict=True))
        total = {name: total[name] + part if total else part for name, part in parts.items()}
        params, loss = {name: leaf.detach() for name, leaf in leaves.items()}, state.loss.detach()
        state, mean = state.replace(params=params, loss=loss, grads=total), mean + loss * (len(x) / samples)
        state = yield "after_backward", state
        total = state.grads
    return state.replace(loss=mean, grads={name: grad / (samples / power) for name, grad in total.items()})


def update(state: State, task: Task) -> State:
    moved = {name: old.mul(task.momentum).add(state.grads[name]) for name, old in state.momentum.items()}
    lr, timestamp = task.lr(state.timestamp), state.timestamp.next_batch(len(state.batch[0]))
    params = {name: torch.add(param, moved[name], alpha=-lr) for name, param in state.params.items()}
    return state.replace(params=params, momentum=moved, timestamp=timestamp, grads=None)


def evaluation(state: State, task: Task) -> Script:
    model = copy.deepcopy(task.model).eval()
    for label, data in task.evaluators.items():
        state = yield "eval_start", state
        sums = torch.zeros(3, dtype=torch.float64)
        for inputs, targets in data:
            with torch.no_grad():
                outputs = functional_call(model, {**state.params, **state.buffers}, (inputs,))
                right = (outputs.argmax(dim=1) == targets).sum()
                sums += torch.stack([task.loss(outputs, targets) * len(inputs), right, torch.tensor(len(inputs))])
        measured = {"loss": float(sums[0] / sums[2]), "accuracy": float(sums[1] / sums[2])}
        state = yield "eval_end", state.replace(metrics={**state.metrics, label: measured})
    return state


def epoch(state: State, task: Task, at: str) -> Script:
    if at not in INSIDE_EPOCH:
        state = yield "epoch_start", state
    if at != "epoch_end":
        batches = task.batches(state.seed, state.timestamp.epoch)
        while state.timestamp.batch_in_epoch < len(batches):
            if task.until(state.timestamp):
                return state
            state = yield "batch_start", state.replace(batch=batches[state.timestamp.batch_in_epoch])
            state = yield from gradients(state, task)
            state = yield "after_train_batch", state
            state = yield "batch_end", update(state, task)
        state = state.replace(timestamp=state.timestamp.next_epoch(), batch=None, loss=None)
        state = yield "epoch_end", state
    state = yield from evaluation(state, task)
    return (yield "epoch_checkpoint", state)


def script(state: State, task: Task) -> Script:
    """The order of events, from the boundary at which a State was kept."""
    at, task = state.event, task._replace(model=copy.deepcopy(task.model).train())
    if at not in BOUNDARIES:
        raise ValueError(f"can't resume from {at}, inside a batch; use one of {BOUNDARIES[1:]}")
    state = yield "fit_start", state
    while at in INSIDE_EPOCH or not task.until(state.timestamp):
        state, at = (yield from epoch(state, task, at)), ""
    if state.timestamp.batch_in_epoch:
        state = yield from evaluation(state, task)
    return (yield "fit_end", state)


def steps(state: State, task: Task, algorithms: Sequence[Algorithm]) -> Iterator[tuple[str | None, State]]:
    """Each State with what made it: "loop", an algorithm, or None as it is observed."""
    run: Any = script(state, task)
    received: Any = None
    while True:
        try:
            event, state = run.send(received)
        except StopIteration:
            return
        yield "loop", (received := state.replace(event=event))
        bound = [algorithm for algorithm in algorithms if algorithm.event == event]
        for algorithm in reversed(bound) if event.startswith("after_") else bound:
            received = algorithm.function(received)
            yield algorithm.name, received
        yield None, received


def fit(
    start: State, task: Task, algorithms: Sequence[Algorithm] = (), callbacks: Sequence[Callable[..., None]] = ()
) -> Iterator[tuple[str, State]]:
    for by, state in steps(start, task, algorithms):
        if by is None:
            for callback in callbacks:
                callback(state.event, state)
            yield state.event, state


def blame(start: State, task: Task, algorithms: Sequence[Algorithm]) -> Counter[tuple[str | None, str]]:
    """How often the loop and each algorithm changed a parameter, gradient or loss."""

    def leaves(state: State) -> dict[str, Any]:
        grads = {f"grads/{name}": grad for name, grad in (state.grads or {}).items()}
        return {**{f"params/{name}": param for name, param in state.params.items()}, **grads, "loss": state.loss}

    changed, before = Counter[tuple[str | None, str]](), leaves(start)
    for by, state in steps(start, task, algorithms):
        after = leaves(state)
        for path, leaf in after.items():
            old = before.get(path)
            if leaf is not None and (old is None or not torch.equal(old, leaf)):
                changed[by, path] += 1
        before = after
    return changed


def main() -> None:
    from sklearn.datasets import load_digits

    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    task = Task(
        model=model,
        batches=lambda seed, epoch: shuffled(images[:1500], digits[:1500], 64, seed, epoch),
        loss=nn.functional.cross_entropy,
        lr=lambda timestamp: 0.1 * (1 - timestamp.batch / 96),
        until=lambda timestamp: timestamp.batch >= 90,
        momentum=0.9,
        microbatch_size=24,
        evaluators={"held out": [(images[1500:], digits[1500:])]},
    )

    def clipped(state: State) -> State:
        norm = torch.stack([grad.norm() for grad in state.grads.values()]).norm().clamp(min=1.0)
        return state.replace(grads={name: grad / norm for name, grad in state.grads.items()})

    def report(event: str, state: State) -> None:
        if event in ("epoch_checkpoint", "fit_end"):
            print(f"batch {state.timestamp.batch}: {state.metrics['held out']['accuracy']:.1%} right")

    def same(one: State, other: State) -> bool:
        return all(torch.equal(param, other.params[name]) for name, param in one.params.items())

    clip = Algorithm("clip", "after_train_batch", clipped)
    history = [state for _, state in fit(begin(model, seed=0), task, [clip], [report])]
    kept = next(state for state in history if state.event == "batch_end" and state.timestamp.batch == 60)

    def end_of(start: State, task: Task) -> State:
        return [state for _, state in fit(start, task, [clip])][-1]

    print(f"resumed from batch 60: {'the same' if same(end_of(kept, task), history[-1]) else 'other'} bits")
    forks = {"another seed": (kept.replace(seed=1), task), "no decay": (kept, task._replace(lr=lambda timestamp: 0.1))}
    for name, fork in forks.items():
        print(f"forked there with {name}: {end_of(*fork).metrics['held out']['accuracy']:.1%} right")
    short = task._replace(until=lambda timestamp: timestamp.batch >= 20)
    changes = blame(begin(model, seed=0), short, [clip])
    for by, path in (("loop", "grads/0.weight"), ("clip", "grads/0.weight"), ("loop", "params/0.weight")):
        print(f"{by} changed {path} {changes[by, path]} times in 20 batches")


if __name__ == "__main__":
    main()
