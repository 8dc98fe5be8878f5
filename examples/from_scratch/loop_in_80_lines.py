"""The same with algorithms, random numbers that come from the State, and exact resumption: 80 lines of torch.

python examples/from_scratch/loop_in_80_lines.py
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call


class State(NamedTuple):
    params: dict[str, Tensor]
    momentum: dict[str, Tensor]
    seed: int
    epoch: int = 0
    batch: int = 0
    batch_in_epoch: int = 0
    event: str = ""
    loss: Any = None
    grads: Any = None

    def replace(self, **changes: Any) -> "State":
        return self._replace(**changes)


def begin(model: nn.Module, seed: int) -> State:
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return State(params, {name: torch.zeros_like(param) for name, param in params.items()}, seed)


def derive(seed: int, *path: int | str) -> int:
    """A seed is a hash of where it is used: there is no generator to be saved."""
    return int.from_bytes(blake2b(ascii((seed, *path)).encode(), digest_size=8).digest(), "little") >> 1


def shuffled(inputs: Tensor, targets: Tensor, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    for rows in torch.randperm(len(inputs), generator=generator).split(size):
        yield inputs[rows], targets[rows]


def script(state: State, model: nn.Module, batches: Any, loss: Any, lr: float, momentum: float, epochs: int) -> Any:
    """The order of events: each yields a State, and receives what algorithms made."""
    while state.epoch < epochs:
        if state.event in ("", "epoch_end"):
            state = yield "epoch_start", state
        for inputs, targets in islice(batches(state.seed, state.epoch), state.batch_in_epoch, None):
            state = yield "batch_start", state
            leaves = {name: param.detach().requires_grad_() for name, param in state.params.items()}
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(derive(state.seed, "forward", state.epoch, state.batch, 0, 0))
                value = loss(functional_call(model, leaves, (inputs,)), targets)
            state = yield "after_loss", state.replace(params=leaves, loss=value)
            grads = dict(zip(leaves, torch.autograd.grad(state.loss, list(leaves.values())), strict=True))
            params = {name: leaf.detach() for name, leaf in leaves.items()}
            state = yield "after_train_batch", state.replace(params=params, grads=grads, loss=state.loss.detach())
            moved = {name: old.mul(momentum).add(state.grads[name]) for name, old in state.momentum.items()}
            params = {name: torch.add(param, moved[name], alpha=-lr) for name, param in state.params.items()}
            batch, batch_in_epoch = state.batch + 1, state.batch_in_epoch + 1
            state = state.replace(params=params, momentum=moved, grads=None, batch=batch, batch_in_epoch=batch_in_epoch)
            state = yield "batch_end", state
        state = yield "epoch_end", state.replace(epoch=state.epoch + 1, batch_in_epoch=0, loss=None)


def fit(
    state: State, algorithms: Sequence[tuple[str, Callable[[State], State]]] = (), **settings: Any
) -> Iterator[tuple[str, State]]:
    """The driver: it knows the algorithms, and the script does not."""
    run, received = script(state, **settings), None
    while True:
        try:
            event, state = run.send(received)
        except StopIteration:
            return
        received = state.replace(event=event)
        for when, algorithm in algorithms:
            received = algorithm(received) if when == event else received
        yield event, received


def main() -> None:
    from sklearn.datasets import load_digits

    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def batches(seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return shuffled(images[:1536], digits[:1536], 64, seed, epoch)

    def clip(state: State) -> State:
        norm = torch.stack([grad.norm() for grad in state.grads.values()]).norm().clamp(min=1.0)
        return state.replace(grads={name: grad / norm for name, grad in state.grads.items()})

    def run(state: State) -> list[State]:
        settings = {"model": model, "batches": batches, "loss": nn.functional.cross_entropy}
        rates = {"lr": 0.1, "momentum": 0.9, "epochs": 3}
        return [state for _, state in fit(state, [("after_train_batch", clip)], **settings, **rates)]

    def same(one: State, other: State) -> bool:
        return all(torch.equal(param, other.params[name]) for name, param in one.params.items())

    history = run(begin(model, seed=0))
    boundaries = [state for state in history if state.event in ("epoch_start", "batch_end", "epoch_end")]
    exact = sum(same(history[-1], run(state)[-1]) for state in boundaries[:-1:7])
    print(f"{exact} of {len(boundaries[:-1:7])} runs that resumed from a boundary end with the same bits")
    kept = boundaries[40]
    forked = run(kept.replace(seed=1))[-1]
    print(f"from batch {kept.batch} with another seed: {'the same' if same(forked, history[-1]) else 'other'} bits")


if __name__ == "__main__":
    main()
