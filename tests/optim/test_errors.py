"""Optimizers refuse at the door what they can't use, and teach."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pure_loop import schedules
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, kernels, partition, sgd
from pure_loop.time import Timestamp
from tests.support.optimizing import named, tensors


def test_partition_teaches() -> None:
    opt = partition({"a": adamw(), "b": sgd()}, label=lambda name, tensor: "c" if name == "p1" else "a")
    with pytest.raises(
        ArgumentError, match=r"parameter 'p1' \(shape \(3,\)\) is 'c', and the optimizers are \['a', 'b'\]"
    ):
        opt.init(named(tensors(0, torch.float32)))
    with pytest.raises(ArgumentTypeError, match="'a' must be an optimizer"):
        partition({"a": torch.optim.SGD}, label=lambda name, tensor: "a")  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError, match="needs a mapping"):
        partition({}, label=lambda name, tensor: "a")
    with pytest.raises(ArgumentTypeError, match="label must be a function"):
        partition({"a": adamw()}, label="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(lr=-1.0), "adamw: lr must be a finite number of at least 0, got -1.0"),
        (lambda: adamw(lr=math.nan), "lr must be"),
        (lambda: adam(betas=(0.9, 1.0)), r"adam: betas\[1\] must be a number of at least 0 and less than 1"),
        (lambda: adam(betas=(-0.1, 0.9)), r"betas\[0\]"),
        (lambda: adamw(betas=0.9), "betas must be two numbers"),  # type: ignore[arg-type]
        (lambda: adamw(eps=-1e-8), "eps must be"),
        (lambda: adamw(weight_decay=math.inf), "weight_decay must be"),
        (lambda: adamw(amsgrad=1), "amsgrad must be True or False"),  # type: ignore[arg-type]
        (lambda: adamw(lr="0.1"), "lr must be a number, got '0.1' of type str"),  # type: ignore[arg-type]
        (lambda: adamw(lr=True), "lr must be a number"),
        (lambda: adamw(lr="1e-3"), r"write adamw\(lr=3e-4\), or a function of the timestamp"),  # type: ignore[arg-type]
        (lambda: adamw(lr=None), "lr must be a number, got None of type NoneType"),  # type: ignore[arg-type]
        (lambda: sgd(lr=torch.ones(2)), "lr must be a number, got .* of type Tensor"),  # type: ignore[arg-type]
        (lambda: adamw(lr=schedules.cosine), r"lr is the class cosine; give a schedule: cosine\(\.\.\.\)"),  # type: ignore[arg-type]
        (lambda: sgd(lr=lambda: 0.1), r"the function <lambda>, which can't .*: it is called as <lambda>\(timestamp\)"),  # type: ignore[arg-type, misc]
        (
            lambda: adamw(torch.nn.Linear(1, 1).parameters()),  # type: ignore[arg-type]
            r"adamw is given the parameters by fit: write adamw\(lr=3e-4\)",
        ),
        (lambda: sgd(torch.nn.Linear(1, 1)), "sgd is given the parameters by fit"),
        (
            lambda: adamw(torch.nn.Linear(1, 1).parameters(), lr=1e-3),  # type: ignore[misc, arg-type]
            "adamw was given lr twice.*; fit gives an optimizer the parameters",
        ),
        (lambda: adamw(learning_rate=1e-3), "no argument 'learning_rate': write lr=0.001"),  # type: ignore[call-arg]
        (lambda: adam(beta1=0.9), r"no argument 'beta1': write betas=\(0.9, 0.999\)"),  # type: ignore[call-arg]
        (lambda: sgd(momentun=0.9), r"no argument 'momentun'; did you mean momentum=\?"),  # type: ignore[call-arg]
        (lambda: sgd(momentum=-0.5), "sgd: momentum must be"),
        (lambda: sgd(nesterov=True), "nesterov needs a momentum"),
        (lambda: sgd(momentum=0.9, dampening=0.1, nesterov=True), "no dampening"),
    ],
)
def test_hyperparameters_are_refused_at_the_door(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        make()


@pytest.mark.parametrize("opt", [adamw(), sgd(momentum=0.9), sgd(), from_torch(torch.optim.AdamW)])
def test_gradients_that_do_not_fit_are_refused(opt: Optimizer) -> None:
    params = FrozenDict(w=torch.zeros(2, 3), b=torch.zeros(3))
    state, bias = opt.init(params), torch.ones(3)

    def update(**grads: Any) -> None:
        opt.update(FrozenDict(grads), state, params, Timestamp())

    with pytest.raises(ArgumentError, match=r"gradient of 'w' has shape \(3, 2\), its parameter has shape \(2, 3\)"):
        update(w=torch.ones(3, 2), b=bias)
    with pytest.raises(ArgumentError, match=r"gradient of 'b' has shape \(2,\)"):
        update(w=torch.ones(2, 3), b=torch.ones(2))
    with pytest.raises(
        ArgumentError, match=r"gradient of 'w' has dtype torch.bfloat16, its parameter has dtype torch.flo"
    ):
        update(w=torch.ones(2, 3, dtype=torch.bfloat16), b=bias)
    with pytest.raises(ArgumentError, match=r"missing \['b'\].*None for a parameter"):
        update(w=torch.ones(2, 3))
    with pytest.raises(ArgumentError, match=r"not a parameter \['v'\]"):
        update(w=torch.ones(2, 3), b=bias, v=bias)
    if not opt.name.startswith("from_torch"):
        with pytest.raises(ArgumentError, match="gradient of 'w' is sparse"):
            update(w=torch.ones(2, 3).to_sparse(), b=bias)


def test_a_tensor_on_another_device_is_named() -> None:
    with pytest.raises(ArgumentError, match="the gradient of 'b' has device meta, its parameter has device cpu"):
        kernels.match_layout(torch.ones(3, device="meta"), torch.ones(3), "the gradient of 'b'")


def test_a_state_of_something_else_is_refused() -> None:
    params, grads = FrozenDict(w=torch.zeros(2, 3)), FrozenDict(w=torch.ones(2, 3))
    for opt, other in [(adamw(), sgd()), (sgd(), adamw()), (adamw(amsgrad=True), adamw()), (sgd(momentum=0.9), sgd())]:
        with pytest.raises(ResumeError, match="another optimizer, or this one with other options"):
            opt.update(grads, other.init(params), params, Timestamp())
    for opt in (adamw(), sgd(momentum=0.9)):
        with pytest.raises(ResumeError, match=r"state of 'w'.*has shape \(4, 3\), its parameter has shape \(2, 3\)"):
            opt.update(grads, opt.init(FrozenDict(w=torch.zeros(4, 3))), params, Timestamp())
        with pytest.raises(ResumeError, match=r"missing \['w'\], not a parameter \['v'\]"):
            opt.update(grads, opt.init(FrozenDict(v=torch.zeros(2, 3))), params, Timestamp())


@pytest.mark.parametrize("opt", [adamw(lr=lambda t: math.nan), sgd(lr=lambda t: -0.5)])
def test_a_schedule_that_gives_no_learning_rate_is_refused(opt: Optimizer) -> None:
    params = FrozenDict(w=torch.zeros(2))
    with pytest.raises(
        ArgumentError, match=r"learning rate must be finite and at least 0; .* gave .* at Timestamp\(epoch=0"
    ):
        opt.update(params, opt.init(params), params, Timestamp())


@pytest.mark.parametrize("value", [None, torch.ones(2), "0.1", [0.1]])
@pytest.mark.parametrize("make", [adamw, sgd, lambda lr: from_torch(torch.optim.Adagrad, lr=lr)])
def test_a_schedule_that_gives_no_number_is_named(make: Any, value: Any) -> None:
    def falling(timestamp: Timestamp) -> Any:
        return value

    opt = make(lr=falling)
    params = FrozenDict(w=torch.zeros(2))
    says = rf"(?s)the learning rate must be a number, and falling gave .* of type {type(value).__name__}"
    with pytest.raises(ArgumentTypeError, match=says):
        opt.update(params, opt.init(params), params, Timestamp())


@pytest.mark.parametrize("value", [torch.tensor(0.1), np.float32(0.1), 1])
def test_a_schedule_may_give_any_one_number(value: Any) -> None:
    opt = sgd(lr=lambda timestamp: value)
    params = FrozenDict(w=torch.ones(2))
    new, _ = opt.update(params, opt.init(params), params, Timestamp())
    torch.testing.assert_close(new["w"], torch.ones(2) * (1 - float(value)))


@pytest.mark.parametrize("opt", [adamw(), sgd(momentum=0.9)], ids=["adamw", "sgd"])
def test_an_update_without_memory_says_how_to_begin(opt: Optimizer) -> None:
    params = named(tensors(0, torch.float32))
    nothing: Any = None
    with pytest.raises(ResumeError, match=r"opt_state is None, .*state\.replace\(opt_state=optimizer\.init"):
        opt.update(params, nothing, params, Timestamp())


@pytest.mark.parametrize("given", [torch.optim.lr_scheduler.ReduceLROnPlateau, torch.optim.lr_scheduler.StepLR])
@pytest.mark.parametrize("make", [adamw, sgd, lambda lr: from_torch(torch.optim.RMSprop, lr=lr)])
def test_schedulers_of_torch_are_refused_with_what_to_write(given: Any, make: Any) -> None:
    """The class was answered with advice to pass an instance, which was refused, too."""
    reference = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    options = {"step_size": 1} if given is torch.optim.lr_scheduler.StepLR else {}
    says = "a metric" if given is torch.optim.lr_scheduler.ReduceLROnPlateau else r"pl\.schedules"
    for scheduler in (given, given(reference, **options)):
        with pytest.raises(ArgumentTypeError, match=rf"lr is torch's scheduler {given.__name__}.*function of.*{says}"):
            make(lr=scheduler)
