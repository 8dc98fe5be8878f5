"""What code outside of the loop reads, in a way that is easily missed, stays: it is compared with a run that copies."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pure_loop as pl
from pure_loop.loop import driver
from pure_loop.stages.ownership import Ownership

DATA = [
    (torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.linspace(-1, 1, 8)[:, None]) for i in range(4)
]


def stream(donate: Any, *, data: Any = DATA, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    given = {"loss": nn.MSELoss(), "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep", "donate": donate}
    return pl.fit(model, data, **(given | settings))


def weight_behind(value: Tensor) -> Tensor:
    """A leaf of two dimensions in the graph of a tensor."""
    nodes = [value.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if getattr(node, "variable", torch.empty(0)).ndim == 2:
            return node.variable  # type: ignore[no-any-return]
        nodes += [] if node is None else [function for function, _ in node.next_functions]
    raise AssertionError("no leaf")


Kept = list[Tensor]


def leaf_with_hook(donate: Any) -> Kept:
    kept: Kept = []
    for event, state in stream(donate, microbatch_size=4):
        if event is pl.Event.AFTER_FORWARD and len(kept) <= state.timestamp.batch:
            leaf = state.params["0.weight"]
            leaf.register_hook(lambda gradient: None)
            kept.append(leaf)
    return kept


def forward_of_an_algorithm(event: pl.Event, what: str) -> Callable[[Any], Kept]:
    def run(donate: Any) -> Kept:
        kept: list[Any] = []

        def look(state: pl.State, stages: Any) -> pl.State:
            result = stages.forward(state.replace(microbatch=state.batch))
            if what == "state":
                kept.append(result)
            elif what == "parameter":
                kept.append(result.params["0.weight"])
            else:
                kept.append(result.outputs if what == "outputs" else stages.loss(result).loss)
            return state

        pl.run(stream(donate, algorithms=[pl.algorithm(event, name="look")(look)]))
        if what == "state":
            return [state.params["0.weight"] for state in kept]
        return kept if what == "parameter" else list(map(weight_behind, kept))

    return run


def graph_of_an_evaluation(donate: Any) -> Kept:
    kept = [
        state.outputs
        for event, state in stream(donate, evaluators=pl.Evaluator(DATA, gradients=True, interval="1ba"))
        if event is pl.Event.EVAL_AFTER_FORWARD
    ]
    return list(map(weight_behind, kept))


def clock_that_reads(donate: Any) -> Kept:
    """It is called after references were counted, and before the step."""
    kept: Kept = []
    scope: dict[str, Any] = {"state": None, "seconds": 0.0}

    def clock() -> float:
        state = scope["state"]
        scope["seconds"] += 1.0
        if state is not None and state.event is pl.Event.AFTER_TRAIN_BATCH:
            kept.append(state.params["0.weight"])
        return scope["seconds"]  # type: ignore[no-any-return]

    scope["stream"] = stream(donate, clock=clock)
    exec("for event, state in stream: pass", scope)  # as in a module
    return kept


class FunctionMode(TorchFunctionMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            self.kept.append(args[1])
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "addmm" in str(function):
            self.kept.append(args[0])
        return function(*args, **(kwargs or {}))


@contextmanager
def packing(kept: Kept) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class Spying(Tensor):
    kept: ClassVar[Kept] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear and type(args[1]) is Tensor:
            cls.kept.append(args[1].detach())
        return super().__torch_function__(function, types, args, kwargs or {})


def around(context: Callable[[Kept], Any]) -> Callable[[Any], Kept]:
    def run(donate: Any) -> Kept:
        kept: Kept = []
        with context(kept):
            pl.run(stream(donate))
        return kept

    return run


def batch_of_a_subclass(donate: Any) -> Kept:
    Spying.kept = []
    pl.run(stream(donate, data=[(inputs.as_subclass(Spying), targets) for inputs, targets in DATA]))
    return Spying.kept


CASES: dict[str, Callable[[Any], Kept]] = {
    "a leaf with a hook, of the first microbatch": leaf_with_hook,
    "a graph of an evaluation": graph_of_an_evaluation,
    "a clock": clock_that_reads,
    "a mode of functions": around(FunctionMode),
    "a mode of operations": around(DispatchMode),
    "hooks of saved tensors": around(packing),
    "a batch of a subclass": batch_of_a_subclass,
    **{
        f"{what} of a forward at {event.name}": forward_of_an_algorithm(event, what)
        for event in (pl.Event.BATCH_START, pl.Event.BEFORE_FORWARD, pl.Event.AFTER_BACKWARD)
        for what in ("state", "parameter", "outputs", "loss")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_stays(case: str) -> None:
    kept, truth = CASES[case]("auto"), CASES[case](False)
    assert len(kept) == len(truth) > 0
    for tensor, copy in zip(kept, truth, strict=True):
        assert torch.equal(tensor.detach().as_subclass(Tensor), copy.detach().as_subclass(Tensor))


Pairs = list[tuple[Tensor, Tensor]]
"""What is kept, with its numbers at that time."""


def with_numbers(tensors: Iterable[Tensor]) -> Pairs:
    return [(tensor, tensor.detach().clone()) for tensor in {id(each): each for each in tensors}.values()]


class AllFunctions(FunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.kept += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return result


class AllOperations(DispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.kept += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return result


def in_one_batch(mode: Callable[[Kept], Any]) -> Pairs:
    """A mode that is there from the start of a batch to its end, and keeps whatever its operations have."""
    kept: Kept = []
    inside, pairs = mode(kept), Pairs()
    for event, state in stream("auto"):
        if event is pl.Event.BATCH_START and state.timestamp.batch == 2:
            inside.__enter__()
        if event is pl.Event.BATCH_END and state.timestamp.batch == 3:
            inside.__exit__(None, None, None)
            pairs = with_numbers(kept)
    return pairs


def hook_of_all_optimizers() -> Pairs:
    pairs = Pairs()

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        (group,) = optimizer.param_groups
        pairs.extend(with_numbers(each for p in group["params"] for each in (p, optimizer.state[p]["exp_avg"])))

    handle = None
    for event, _ in stream("auto", optimizer=pl.optim.from_torch(torch.optim.Adam, lr=0.1)):
        if event is pl.Event.FIT_START:
            handle = register_optimizer_step_post_hook(hook)
    assert handle is not None
    handle.remove()
    return pairs


def module_kept_by(way: str) -> Pairs:
    """Code of the user's is given a private module once, and its parameters are kept later."""
    modules: list[nn.Module] = []
    pairs = Pairs()

    def evaluated(model: nn.Module, batch: Any) -> Any:
        modules.append(model)
        return model(batch[0])

    options: dict[str, Any] = {}
    if way == "an evaluation":
        options = {"evaluators": DATA[:1], "eval_interval": "2ba", "task": pl.Task(validate=evaluated)}
    elif way == "a hook":
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: modules.append(module))
    for event, state in stream("auto", **options):
        if event is pl.Event.BATCH_END and state.timestamp.batch == 3:
            if way == "apply":
                state.model.apply(modules.append, state.params, state.buffers, training=True)
            elif way == "a hook":
                handle.remove()
        if event is pl.Event.BATCH_END and state.timestamp.batch in (5, 6):
            pairs += with_numbers(parameter for module in modules for parameter in module.parameters())
    return pairs


def hook_of_the_loss() -> Pairs:
    """It is registered when the stream has begun."""
    loss, pairs = nn.MSELoss(), Pairs()
    for event, state in stream("auto", loss=loss):
        if event is pl.Event.BATCH_END and state.timestamp.batch == 2:
            loss.register_forward_hook(
                lambda module, args, output: pairs.extend(with_numbers([weight_behind(args[0])]))
            )
    return pairs


def garbage_collector() -> Pairs:
    pairs = Pairs()
    for event, state in stream("auto"):
        if event is pl.Event.BATCH_END and state.timestamp.batch == 3:
            mappings = [each for each in gc.get_referents(state) if isinstance(each, pl.FrozenDict)]
            pairs += with_numbers(leaf for each in mappings for leaf in each.values() if isinstance(leaf, Tensor))
            del mappings
    return pairs


_NOT_NOTED = pytest.mark.xfail(strict=True, reason="nothing notes what the garbage collector finds: docs/memory.md")

ROUTES: dict[str, Callable[[], Pairs]] = {
    "all functions in one batch": partial(in_one_batch, AllFunctions),
    "all operations in one batch": partial(in_one_batch, AllOperations),
    "a hook of all optimizers": hook_of_all_optimizers,
    "a hook of the loss": hook_of_the_loss,
    "the garbage collector": garbage_collector,
    **{f"a module that {way} has kept": partial(module_kept_by, way) for way in ("an evaluation", "a hook", "apply")},
}


@pytest.mark.parametrize(
    "route", [pytest.param(each, marks=_NOT_NOTED) if each == "the garbage collector" else each for each in ROUTES]
)
def test_what_was_kept_without_a_state_stays(route: str) -> None:
    pairs = ROUTES[route]()
    assert pairs
    assert all(torch.equal(tensor, numbers) for tensor, numbers in pairs)


def test_a_filter_that_leaves_out_the_end_of_a_batch_keeps_its_state() -> None:
    passed = {pl.Event.BATCH_START, pl.Event.AFTER_TRAIN_BATCH}
    last = []
    for donate in ("auto", False):
        for _event, state in filter(lambda pair: pair[0] in passed, stream(donate)):  # noqa: B007
            pass
        last.append(state.params["0.weight"])
    assert torch.equal(*last)


def read_variables(frame: Any, event: str, argument: Any) -> None:
    """Before Python 3.13 the frame keeps what it gives here."""
    frame.f_locals  # noqa: B018


@pytest.mark.parametrize("kind", ["profile", "trace"])
def test_what_a_profiler_or_a_debugger_keeps_stays(kind: str) -> None:
    kept = []

    def keep(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is nn.Linear.forward.__code__ and len(kept) < 12:
            weight = frame.f_locals["self"].weight.detach()
            kept.append((weight, weight.clone()))

    getter, setter = getattr(sys, f"get{kind}"), getattr(sys, f"set{kind}")
    before = getter()
    setter(keep)
    try:
        pl.run(stream("auto", strict=False))
    finally:
        setter(before)
    assert len(kept) == 12
    assert all(torch.equal(weight, numbers) for weight, numbers in kept)


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring is of Python 3.12 and later")
@pytest.mark.parametrize("tool", ["DEBUGGER_ID", "PROFILER_ID", "OPTIMIZER_ID"])
def test_what_a_tool_of_sys_monitoring_keeps_stays(tool: str) -> None:
    monitoring: Any = getattr(sys, "monitoring", None)
    number, begins = getattr(monitoring, tool), monitoring.events.PY_START
    kept = []

    def keep(*_: object) -> None:
        weight = sys._getframe(1).f_locals["self"].weight.detach()
        kept.append((weight, weight.clone()))

    monitoring.use_tool_id(number, "test")
    monitoring.register_callback(number, begins, keep)
    monitoring.set_local_events(number, nn.Linear.forward.__code__, begins)
    try:
        pl.run(stream("auto", strict=False))
    finally:
        monitoring.set_local_events(number, nn.Linear.forward.__code__, 0)
        monitoring.register_callback(number, begins, None)
        monitoring.free_tool_id(number)
    assert len(kept) >= 12
    assert all(torch.equal(weight, numbers) for weight, numbers in kept)


@pytest.mark.parametrize("kind", ["setprofile", "settrace"])
def test_a_profiler_does_not_disturb_the_measurement(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.measure_references()
    expected = Ownership.expected
    monkeypatch.setattr(Ownership, "expected", None)
    getter, setter = (sys.getprofile, sys.setprofile) if kind == "setprofile" else (sys.gettrace, sys.settrace)
    before = getter()
    setter(read_variables)
    try:
        driver.measure_references()
    finally:
        setter(before)
    assert Ownership.expected == expected


def test_a_lost_state_is_no_tree_of_tensors() -> None:
    import optree

    states = [state for event, state in stream(True) if event is pl.Event.BATCH_END]
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.params .* overwritten by the step of batch 1"):
        optree.tree_leaves(states[0], namespace="pure_loop")


def test_the_init_of_an_optimizer_draws_by_the_seed() -> None:
    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        return {name: tensor - 0.1 * (grads[name] + memory[name]) for name, tensor in params.items()}, memory

    def init(params: Any) -> Any:
        return pl.FrozenDict({name: torch.randn_like(tensor) for name, tensor in params.items()})

    def trained(seed: int) -> Tensor:
        pairs = stream("auto", optimizer=pl.Optimizer(name="mine", init=init, update=update, lr=lambda timestamp: 0.1))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        state = pl.run(pairs)
        assert torch.equal(torch.get_rng_state(), before)
        return state.params["0.weight"]

    assert torch.equal(trained(1), trained(2))


@pytest.mark.parametrize("how", ["function", "hook"])
def test_a_backward_that_an_algorithm_puts_in_draws_by_the_seed(how: str) -> None:
    class Drawing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.rand(())

    def change(state: pl.State) -> pl.State:
        if how == "function":
            return state.replace(loss=Drawing.apply(state.loss))
        state.outputs.register_hook(lambda gradient: gradient * torch.rand(()))
        return state

    def trained(seed: int) -> Tensor:
        pairs = stream("auto", algorithms=[pl.algorithm(pl.Event.AFTER_LOSS, name="change")(change)])
        torch.manual_seed(seed)
        return pl.run(pairs).params["0.weight"]

    assert torch.equal(trained(1), trained(2))


def test_a_thread_reads_whole_parameters_or_an_error() -> None:
    """It reads a global variable while steps run; what it has got never changes."""
    scope: dict[str, Any] = {"state": None, "stream": stream("auto", max_duration="60ep")}
    changed: list[bool] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            state = scope["state"]
            try:
                weight = None if state is None else state.params["0.weight"]
            except pl.errors.DonatedStateError:
                continue
            del state
            if weight is not None:
                copy = weight.detach().clone()
                ended.wait(0.001)
                changed.append(not torch.equal(weight, copy))

    thread = threading.Thread(target=watch)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        exec("for event, state in stream: pass", scope)
    finally:
        ended.set()
        thread.join(30)
        sys.setswitchinterval(interval)
    assert not any(changed)
