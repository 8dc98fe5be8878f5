"""A training loop as a generator of (event, state) pairs over an immutable State: the idea in 40 lines of torch.

python examples/from_scratch/loop_in_40_lines.py
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value


class State(NamedTuple):
    params: dict[str, Tensor]
    epoch: int = 0
    batch: int = 0
    loss: Tensor | None = None
    grads: dict[str, Tensor] | None = None


def fit(
    model: nn.Module, data: Iterable[tuple[Tensor, Tensor]], loss: Callable[..., Tensor], lr: float, epochs: int
) -> Iterator[tuple[str, State]]:
    def loss_at(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(functional_call(model, params, (inputs,)), targets)

    state = State({name: param.detach().clone() for name, param in model.named_parameters()})
    for _ in range(epochs):
        yield "epoch_start", state
        for inputs, targets in data:
            yield "batch_start", state
            grads, value = grad_and_value(loss_at)(state.params, inputs, targets)
            state = state._replace(grads=grads, loss=value)
            yield "after_train_batch", state
            params = {name: torch.add(param, grads[name], alpha=-lr) for name, param in state.params.items()}
            state = state._replace(params=params, batch=state.batch + 1, grads=None)
            yield "batch_end", state
        state = state._replace(epoch=state.epoch + 1, loss=None)
        yield "epoch_end", state


def main() -> None:
    from sklearn.datasets import load_digits

    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    data = list(zip(images[:1536].split(64), digits[:1536].split(64), strict=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def accuracy(params: dict[str, Tensor]) -> float:
        right = functional_call(model, params, (images[1536:],)).argmax(dim=1) == digits[1536:]
        return float(right.double().mean())

    history = [state for event, state in fit(model, data, nn.functional.cross_entropy, 0.5, 12) if event == "epoch_end"]
    # The run is over, and each State is what it was: nothing has to be saved in time.
    for state in history:
        print(f"epoch {state.epoch:2}, batch {state.batch}: {accuracy(state.params):.1%} right")
    average = {name: torch.stack([state.params[name] for state in history[-6:]]).mean(0) for name in state.params}
    print(f"the average of the last six: {accuracy(average):.1%} right")
    print(f"the module that was passed: {accuracy(dict(model.named_parameters())):.1%} right")


if __name__ == "__main__":
    main()
