"""Problems: tiny real models with their data and their loss, for laws to be tried on.

Each takes under a millisecond a step, and each has something that training loops get wrong: random numbers drawn in
the forward, buffers written in the forward, a weight used twice, a parameter that is not trained, tokens that are
padding. In ``"exact"`` all sums are exact, so that results that should be equal are equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.pytree import Batch, Outputs, PyTree
from pure_loop.data.batch import map_tensors
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.random import seeded

_FEATURES, _CLASSES, _WORDS = 3, 2, 5


@attrs.frozen(kw_only=True, repr=False)
class Problem:
    """A model, its data and its loss.

    Args:
        name: in reports and in the code that reproduces a failure.
        make_model: ``() -> nn.Module``; draws from torch's generator, which is seeded around the call.
        make_batch: ``(samples, generator) -> batch`` of ``(inputs, targets)``; draws from the generator only.
        loss: ``(outputs, targets) -> tensor`` of shape (), the mean over samples.
        separable: the loss of a batch is the mean of the losses of its samples, each alone. It isn't with dropout, and
            with BatchNorm.
        images: the inputs are images, for algorithms that need them.

    >>> problem = PROBLEMS["linear"]
    >>> problem.model(seed=0)
    Linear(in_features=3, out_features=2, bias=True)
    >>> [tuple(inputs.shape) for inputs, targets in problem.batches((4, 2), seed=0)]
    [(4, 3), (2, 3)]
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[Outputs, PyTree], Tensor]
    separable: bool = True
    images: bool = False

    def model(self, seed: int) -> nn.Module:
        """The model with the parameters of this seed; torch's generator stays as it was."""
        with seeded(seed):
            result = self.make_model()
        # make_model may return the same module each time, and the subject may write to it.
        return copy.deepcopy(result)

    def batches(self, sizes: Iterable[int], seed: int) -> list[Batch]:
        """One batch for each number of samples."""
        generator = torch.Generator().manual_seed(seed)
        return [copy.deepcopy(self.make_batch(samples, generator)) for samples in sizes]

    def in_float64(self) -> Problem:
        """This problem, computed in float64; a sum in another order is then off by 1e-16 and not by 1e-7."""

        def double(tensor: Tensor) -> Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        return attrs.evolve(
            self,
            make_model=lambda: copy.deepcopy(self.make_model()).double(),  # which is in place
            make_batch=lambda samples, generator: map_tensors(double, self.make_batch(samples, generator)),
        )

    def __repr__(self) -> str:
        return f"Problem({self.name!r})"


def _classified(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def make(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, *shape, generator=generator)
        return inputs, torch.randint(_CLASSES, (samples,), generator=generator)

    return make


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(_FEATURES, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, _CLASSES))


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, _CLASSES),
    )


class _Tied(nn.Module):
    """One weight in two places, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(_FEATURES, _FEATURES, bias=False)
        self.decode = nn.Linear(_FEATURES, _FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(_FEATURES, _CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.decode(torch.tanh(self.encode(x)))))
        return out


class _Transformer(nn.Module):
    """One layer of causal attention over four words, with dropout; the words' embedding is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.Linear(4, 12)
        self.mix = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        # (n, words, 2 heads, 2) to (n, 2 heads, words, 2), for each of query, key and value.
        query, key, value = (
            part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.attention(self.norm(x)).chunk(3, dim=-1)
        )
        scores = (query @ key.transpose(-1, -2)) / 2**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=words.device).triu(1)
        attended = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        x = x + self.dropout(self.mix(attended.transpose(1, 2).flatten(-2)))
        # (n, classes, words), as torch's losses have it.
        out: Tensor = (x @ self.embedding.weight.T).transpose(1, 2)
        return out


def _sentences(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(_WORDS, (samples, 5), generator=generator)
    return words[:, :-1], words[:, 1:]


def _integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=generator).double()


def _whole_numbers() -> nn.Module:
    model = nn.Linear(_FEATURES, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    return model


def _exact_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _integers(generator, samples, _FEATURES), _integers(generator, samples, 2)


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of half the squared error, so that its derivative is a whole number a sample."""
    return (outputs - targets).square().sum(dim=1).mul(0.5).mean()


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            name="linear",
            make_model=lambda: nn.Linear(_FEATURES, _CLASSES),
            make_batch=_classified(_FEATURES),
            loss=functional.cross_entropy,
        ),
        Problem(
            name="mlp",
            make_model=_mlp,
            make_batch=_classified(_FEATURES),
            loss=functional.cross_entropy,
            separable=False,
        ),
        Problem(name="tied", make_model=_Tied, make_batch=_classified(_FEATURES), loss=functional.cross_entropy),
        Problem(
            name="convolution",
            make_model=_convolution,
            make_batch=_classified(1, 4, 4),
            loss=functional.cross_entropy,
            separable=False,
            images=True,
        ),
        Problem(
            name="transformer",
            make_model=_Transformer,
            make_batch=_sentences,
            loss=functional.cross_entropy,
            separable=False,
        ),
        Problem(name="exact", make_model=_whole_numbers, make_batch=_exact_batch, loss=_half_square),
    )
}
"""The built-in problems, the simplest first."""


def as_problem(value: Problem | str) -> Problem:
    """A problem, or the one of this name.

    Raises:
        ArgumentError: no problem has this name.
        ArgumentTypeError: neither a name nor a problem.
    """
    if isinstance(value, Problem):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(f"problem={value!r}: give a name such as 'linear', or a testing.Problem(...).")
    if value not in PROBLEMS:
        raise ArgumentError(f"problem={value!r} is not known; there are {', '.join(map(repr, PROBLEMS))}.")
    return PROBLEMS[value]


def as_problems(value: Problem | str | Iterable[Problem | str]) -> tuple[Problem, ...]:
    """What a ``problems=`` argument holds.

    Raises:
        ArgumentError: nothing, or a name that is not known.
        ArgumentTypeError: neither names nor problems.
    """
    if not isinstance(value, Problem | str | Iterable):
        raise ArgumentTypeError(f"problems={value!r}: give names such as ['linear', 'mlp'], or testing.Problem(...)s.")
    listed = [value] if isinstance(value, Problem | str) else list(value)
    if not listed:
        raise ArgumentError("problems=(): give one at least, such as problems=['linear'].")
    return tuple(as_problem(item) for item in listed)
