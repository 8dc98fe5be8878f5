"""``ensemble``: what stands in the place of the model where several are trained at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import accepts, check_choice, check_integer, name_of
from pure_loop._internal.suggestions import teaching
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.members.each import listed_numbers
from pure_loop.members.stacking import stacked
from pure_loop.membership import Fallback
from pure_loop.model.checks import refuse_untrainable
from pure_loop.random.seeds import seeded_all
from pure_loop.state import State, with_fields


@attrs.frozen
class Ensemble:
    """Several models of one structure; made by :func:`ensemble`.

    ``ensemble.module(i)`` is the module of one member, as it begins.

    Attributes:
        make_model: makes the module of a member.
        seeds: of the members, in order.
        data: ``"shared"`` or ``"own"``.
        fallback: ``"loop"`` or None.
    """

    make_model: Callable[..., nn.Module]
    seeds: tuple[int, ...]
    data: Literal["shared", "own"]
    fallback: Fallback

    def module(self, number: int) -> nn.Module:
        """The module of a member, made under its seed, as it is after ``torch.manual_seed(seed)``.

        Raises:
            ArgumentTypeError: ``make_model`` returned something else.
        """
        seed = self.seeds[number]
        with seeded_all(seed):
            module = self.make_model() if accepts(self.make_model, 0) else self.make_model(seed)
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"pl.ensemble: {name_of(self.make_model)} returned {type(module).__name__} for seed {seed}: it makes "
                "and returns the module of one member."
            )
        refuse_untrainable(module)
        return module

    def _modules(self) -> list[nn.Module]:
        modules = [self.module(number) for number in range(len(self.seeds))]
        if len({id(module) for module in modules}) < len(modules):
            raise ArgumentError(
                f"pl.ensemble: {name_of(self.make_model)} returned one module for two members: make a new one in each "
                "call, lambda: torch.nn.Linear(2, 1)."
            )
        return modules

    def state(self, seed: int, device: torch.device | str | None, seeds: Iterable[int] | None = None) -> State:
        """The State of all members, before INIT.

        Args:
            seed: of what the members share: their data, unless each has its own order.
            device: where the tensors go; None leaves them where they are.
            seeds: of the members' random numbers in training; None: those that they were made under.

        Raises:
            ArgumentError: their structures differ, two are one module, or there are more or fewer ``seeds``.
        """
        of_training = self.seeds if seeds is None else tuple(seeds)
        if len(of_training) != len(self.seeds):
            raise ArgumentError(
                f"seed=pl.each(...) has length {len(of_training)}, and the ensemble {len(self.seeds)} members: write "
                "one value a member."
            )
        data_seed = seed if self.data == "shared" else None
        states = [
            State.create(module, seed=member_seed, device=device, data_seed=data_seed)
            for module, member_seed in zip(self._modules(), of_training, strict=True)
        ]
        state = stacked(states)
        assert state.ensemble is not None
        return with_fields(state, seed=seed, ensemble=attrs.evolve(state.ensemble, fallback=self.fallback))


def refuse_several(value: object, function: str) -> None:
    """
    Raises:
        ArgumentError: an ensemble, or a State with members, where a function takes one model.
    """
    several = isinstance(value, Ensemble) or (isinstance(value, State) and value.ensemble is not None)
    if several:
        one = "the module of one, ensemble.module(0)" if isinstance(value, Ensemble) else "one, state.member(0)"
        raise ArgumentError(f"{function} takes one model, and was given members: give it {one}, and no pl.each.")


@teaching
def ensemble(
    make_model: Callable[..., nn.Module],
    *,
    seeds: Iterable[int] | Tensor,
    data: Literal["shared", "own"] = "shared",
    fallback: Fallback = None,
) -> Ensemble:
    """Several models of one structure in the place of fit's model: each trains as if it was alone.

    A step of all of them is one vectorised step. Each has its own random numbers, and with :func:`pure_loop.each` its
    own rates and strengths. ``state.member(i)`` is the State of one, which trains on alone.

    Args:
        make_model: ``() -> module``, called once a member, after ``torch.manual_seed(seed)``; or ``(seed) -> module``.
            The modules differ in numbers alone.
        seeds: of the members: under which their models are made and their random numbers in training are drawn.
        data: ``"shared"``: all members see the same batches, in the order of ``fit(seed=)``; ``"own"``: each sees them
            in the order of its own seed, as it would alone.
        fallback: None: members are mapped, and where torch can't, an error names the module, loss, algorithm or
            optimizer, before training; ``"loop"``: they are computed one after the other, with the same results.

    Raises:
        ArgumentTypeError: ``make_model`` is no function, or a seed is no int.
        ArgumentError: there is no seed, or a choice that there is not.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> models = pl.ensemble(lambda: torch.nn.Linear(2, 1), seeds=range(3))
    >>> state = pl.run(pl.fit(models, data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                       optimizer=pl.optim.sgd(lr=pl.each([0.1, 0.05, 0.01]))))
    >>> state.params["weight"].shape, state.member(2).params["weight"].shape
    (torch.Size([3, 1, 2]), torch.Size([1, 2]))
    """
    checked: Any = make_model
    if isinstance(checked, nn.Module) or not callable(checked) or not (accepts(checked, 0) or accepts(checked, 1)):
        kind = "the module" if isinstance(checked, nn.Module) else "a function of other arguments than the seed,"
        what = f"{kind} {name_of(checked)}" if callable(checked) else f"{checked!r:.60}"
        raise ArgumentTypeError(
            f"pl.ensemble: make_model is {what}: write a function that makes the module of one member, "
            "pl.ensemble(lambda: torch.nn.Linear(2, 1), seeds=range(8))."
        )
    seeds = listed_numbers(seeds)
    passed: object = seeds
    if isinstance(passed, str) or not isinstance(passed, Iterable):
        raise ArgumentTypeError(f"pl.ensemble: seeds={seeds!r:.60}: write one int a member, seeds=range(8).")
    wanted = "whole numbers, one a member"
    listed = tuple(check_integer("seeds", seed, where="pl.ensemble", wanted=wanted) for seed in seeds)
    large_seed = next((seed for seed in listed if not -(2**63) <= seed < 2**63), None)
    if large_seed is not None:
        raise ArgumentError(f"pl.ensemble: the seed {large_seed} has more than 64 bits: write one below 2**63.")
    if not listed:
        raise ArgumentError("pl.ensemble: there are no seeds; write one int a member, seeds=range(8).")
    return Ensemble(
        checked,
        listed,
        check_choice("data", data, ("shared", "own"), where="pl.ensemble"),
        check_choice("fallback", fallback, (None, "loop"), where="pl.ensemble"),
    )
