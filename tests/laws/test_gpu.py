"""The laws on a CUDA device, steps as CUDA graphs, and that no step waits for it. Skipped where there is none."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted, replay
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, expected
from pure_loop.random.seeds import rng_lock
from pure_loop.stages import engine, ownership
from pure_loop.stages.workspace import Workspace
from pure_loop.testing import Case, check_algorithm, check_loop, laws
from tests.support import problem
from tests.support.problem import LR, close, cross_entropy, mlp, noisy, points
from tests.support.streams import assert_same, assert_same_stream, leaves

# Laws are tried on sentences, too, whose cross-entropy has no deterministic kernel on a GPU.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have a deterministic impl:UserWarning")]

PLAN = Plan(
    batches=(6, 4, 6),
    max_duration="2ep",
    microbatch_size=4,
    evaluators={"val": EvaluatorPlan(batches=(2, 3), interval="2ba")},
)
WHOLE_STEP: dict[str, Any] = {"compile": True, "watch": {Event.BATCH_END}}


def on_device(model_or_state: Any, data: Any, **arguments: Any) -> Any:
    return pl.fit(model_or_state, data, **{**arguments, "device": "cuda"})


def fit(model: Any = None, data: Any = None, algorithms: Any = (), **options: Any) -> Any:
    """Two epochs of four batches."""
    data = points(4, size=8) if data is None else data
    return problem.fit(model, data, algorithms, **{"device": "cuda", "strict": None, **options})


def run(*given: Any, **options: Any) -> pl.State:
    return pl.run(fit(*given, **options))


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


@contextmanager
def no_waits() -> Iterator[Callable[[bool], None]]:
    """Gives what says whether a wait for the device is an error from now on."""
    try:
        yield lambda quiet: torch.cuda.set_sync_debug_mode("error" if quiet else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_loop_and_algorithms_keep_their_laws_on_the_device() -> None:
    assert check_loop(on_device, max_examples=5, thorough=True).ok
    for make in (pl.algorithms.sam, lambda: pl.algorithms.ema(half_life="2ba")):
        assert check_algorithm(make, fit=on_device, max_examples=3, thorough=True).ok


def test_a_stream_is_on_the_device_deterministic_exact_and_kept() -> None:
    """Whatever the device's random state, which stays as it is. A State that was kept on the CPU resumes there."""
    case = Case(plan=PLAN, problem="mlp", precision="amp_fp16")
    streams = []
    for seed in (1, 2):
        torch.cuda.manual_seed(seed)
        before = torch.cuda.get_rng_state()
        streams.append(case.run(fit=on_device))
        assert torch.equal(torch.cuda.get_rng_state(), before), "the device's random state changed"
    assert_same_stream(streams[1], streams[0], "with another random state")
    for event, state in streams[0]:
        if event is Event.BATCH_END:
            tensors = {path: leaf for path, leaf in leaves(state).items() if isinstance(leaf, Tensor)}
            assert not [path for path, leaf in tensors.items() if leaf.device.type != "cuda"]
    for law in (laws.resumption, laws.value, laws.observer_invariance):
        law(None, case, fit=on_device)
    kept = next(s for e, s in case.run() if e is Event.BATCH_END and s.timestamp.batch == 2)
    last = case.run(fit=on_device, start=kept)[-1][1]
    assert (last.device.type, last.timestamp.batch) == ("cuda", streams[0][-1][1].timestamp.batch)


def test_dropout_differs_between_batches() -> None:
    data = [(torch.ones(64, 4), torch.zeros(64, dtype=torch.int64))] * 4
    stream = fit(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), data, optimizer=pl.optim.sgd(lr=0.0))
    masks = [state.outputs for event, state in stream if event is Event.AFTER_FORWARD]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_half_precision_is_that_of_the_loop_by_hand() -> None:
    model, data = mlp().cuda(), points(2, size=8, seed=1)
    state = run(model, data, max_duration="4ep", precision="amp_fp16", optimizer=pl.optim.sgd(lr=LR, momentum=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in data * 4:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(inputs.cuda()), targets.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    close(state.params, {name: each.detach() for name, each in model.named_parameters()}, 1e-5)
    assert float(state.loss_scale) == scaler.get_scale()


OPTIMIZERS = {"adamw": pl.optim.adamw(lr=0.01), "sgd": pl.optim.sgd(lr=0.01, momentum=0.9)}


@pytest.mark.parametrize(
    ("optimizer", "precision", "nonfinite"),
    [
        ("adamw", "amp_bf16", "skip"),
        ("adamw", "amp_fp16", "skip"),
    ],
)
def test_a_step_never_waits_for_the_device(optimizer: str, precision: str, nonfinite: str) -> None:
    """From one batch to the next nothing is read from the device, and nothing is copied to it but the batch."""
    stream = fit(
        noisy(),
        [tuple(part.pin_memory() for part in batch) for batch in points(5, size=8)],
        [pl.algorithms.ema(half_life="10ba"), pl.algorithms.label_smoothing(0.1)],
        optimizer=OPTIMIZERS[optimizer],
        microbatch_size=4,
        precision=precision,
        nonfinite=nonfinite,
        clip_grad=1.0,
        callbacks=[pl.callbacks.SpeedMonitor()],
        loggers=[pl.loggers.InMemoryLogger()],
        clock=time.monotonic,
    )
    kept = []
    with no_waits() as quiet:
        for event, state in stream:
            if event is Event.BATCH_END:
                kept.append(state.loss)
                # The first step may set things up (kernels, workspaces); the first two are compared by value.
                quiet(state.timestamp.batch_in_epoch in (3, 4))
    state.check_finite()
    assert len(kept) == 10


def test_the_debug_mode_sees_a_wait() -> None:
    """The test above can fail."""
    value = torch.ones((), device="cuda")
    with no_waits() as quiet:
        quiet(True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()


def test_loaders_move_each_batch_once() -> None:
    loader = DataLoader(TensorDataset(*points(1, size=12)[0]), batch_size=4, shuffle=True, pin_memory=True)
    pairs = list(fit(noisy(), loader, max_duration="1ep"))
    assert [event for event, _ in pairs] == expected(Plan(batches=(4, 4, 4), max_duration="1ep"))
    batches = [state.batch for event, state in pairs if state.batch is not None and event not in BOUNDARIES]
    assert {batch[0].device.type for batch in batches} == {"cuda"}


def test_memory_is_flat_on_the_device() -> None:
    used, kept = [], []
    options = {"optimizer": OPTIMIZERS["adamw"], "max_duration": "200ba", "microbatch_size": 4}
    for event, state in fit(noisy(), **options):
        if event is Event.BATCH_END:
            kept.append(state.loss)
            if state.timestamp.batch % 40 == 0:
                used.append(torch.cuda.memory_allocated() - 512 * len(kept))
    assert max(used[1:]) - used[1] <= 4096, used


# A loss on the host.


def on_host(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.float().cpu(), targets.cpu())


@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "skip"}, {"precision": "amp_fp16"}, {"microbatch_size": 4, "clip_grad": 1.0}, {"compile": True}],
    ids=str,
)
def test_a_loss_on_the_host_trains_a_model_on_the_device(options: Any) -> None:
    with interpreted():
        found = run(loss=on_host, **options)
        wanted = run(loss=lambda outputs, y: cross_entropy(outputs.float(), y), **options)
    close(found.params, wanted.params, 1e-3)


def test_a_loss_on_the_host_that_is_not_finite_is_told() -> None:
    data = points(4, size=8)
    data[2] = (data[2][0] * float("nan"), data[2][1])
    for options in ({}, WHOLE_STEP, {"compile": True, "watch": frozenset(), "steps_per_call": 4}):
        with interpreted(), pytest.raises(pl.errors.NonFiniteError, match="batch 2"):
            run(noisy(), data, loss=on_host, **options)


def test_outputs_on_two_devices_of_which_the_loss_takes_one() -> None:
    """The backward of a compiled forward takes zeros for the other, which lie where that lies."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = noisy()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.layers(x)
            return outputs, outputs.cpu() * 2.0

    for part in (0, 1):

        def loss(outputs: tuple[Tensor, Tensor], y: Tensor, part: int = part) -> Tensor:
            return cross_entropy(outputs[part], y.to(outputs[part].device))

        with interpreted():
            found, wanted = (
                run(Both(), loss=loss, watch={Event.AFTER_FORWARD}, compile=compiled) for compiled in (True, False)
            )
        close(found.params, wanted.params, 1e-5)


# Gradients, and the thread that computes them.


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_large_gradients_are_added_up_in_place(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of autograd's has them when that is asked."""
    alone, take = [], Workspace.take_gradients

    def taking(self: Workspace, state: pl.State) -> bool:
        alone.append(take(self, state))
        return alone[-1]

    monkeypatch.setattr(Workspace, "take_gradients", taking)
    for module in (engine, ownership):
        monkeypatch.setattr(module, "LARGE", 0)
    run(noisy(), points(5, size=8), max_duration="4ep", microbatch_size=2, watch=watch)
    assert alone == [True] * len(alone)
    assert len(alone) >= 60


class Noting(torch.autograd.Function):
    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Noting.threads.add(threading.get_ident())
        return gradient


def test_the_backward_runs_in_the_thread_of_the_loop() -> None:
    """Autograd's own have the gradients a moment longer, in which they aren't alone, and know nothing of a tracer."""
    for options in ({}, WHOLE_STEP, {"compile": True, "watch": {Event.AFTER_FORWARD}}):
        Noting.threads.clear()
        with interpreted():
            run(noisy(), points(1, size=8), loss=lambda outputs, y: cross_entropy(Noting.apply(outputs), y), **options)
        assert Noting.threads == {threading.get_ident()}


# Steps as CUDA graphs.


def compiled(algorithms: Any = None, data: Any = None, **options: Any) -> Any:
    """Four epochs of five batches."""
    options = {"optimizer": pl.optim.adamw(lr=pl.schedules.cosine("4ep", peak=0.01)), **WHOLE_STEP, **options}
    algorithms = [pl.algorithms.ema(half_life="5ba")] if algorithms is None else algorithms
    data = points(5, size=8) if data is None else data
    return fit(noisy(), data, algorithms, max_duration="4ep", **options)


def launched(**options: Any) -> pl.State:
    """The same, kernel by kernel."""
    with kernel_by_kernel():
        return pl.run(compiled(**options))


@contextmanager
def kernel_by_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pure_loop.compile.replay.Recorders.of", lambda self, device: None)
        yield


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level("INFO", logger="pure_loop.compile"):
        yield caplog


@pytest.fixture(params=["operation by operation", "compiled"])
def graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "compiled" and importlib.util.find_spec("triton") is None:
        pytest.skip("torch's compiler makes kernels for a GPU with triton, which is not installed")
    if request.param == "compiled" and torch.cuda.get_device_name() == "a simulated GPU":
        pytest.skip("a simulated GPU runs no kernels: see tests/compile/test_triton.py")
    with interpreted() if request.param == "operation by operation" else nullcontext():
        yield


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "skip"}, {"precision": "amp_fp16"}, {"microbatch_size": 4, "clip_grad": 1.0}, {"watch": None}],
    ids=str,
)
def test_steps_as_a_cuda_graph_are_those_that_are_launched_kernel_by_kernel(options: Any, notes: Any) -> None:
    found = pl.run(compiled(**options))
    assert "launched as one CUDA graph" in notes.text
    assert "can't be a CUDA graph" not in notes.text
    assert_same(found, launched(**options), "as a CUDA graph and kernel by kernel")


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"precision": "amp_fp16"}], ids=str)
def test_steps_as_a_cuda_graph_write_in_place_and_what_was_kept_stays(options: Any, copied: list[bool]) -> None:
    kept = [(state.loss, float(state.loss)) for _, state in compiled(**options)]
    assert copied == [True] + [False] * 19
    for _, state in compiled(**options):
        if state.timestamp.batch == 10:
            params = state.params, {name: tensor.cpu() for name, tensor in state.params.items()}
    assert [loss.item() for loss, _ in kept] == [number for _, number in kept]
    assert all(torch.equal(params[0][name].cpu(), numbers) for name, numbers in params[1].items())


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compiled_step_never_waits_for_the_device(optimizer: str) -> None:
    pinned = [tuple(part.pin_memory() for part in batch) for batch in points(5, size=8)]
    with no_waits() as quiet:
        for _, state in compiled(data=pinned, optimizer=OPTIMIZERS[optimizer], clip_grad=1.0):
            # In the first epoch it is recorded.
            quiet(state.timestamp.epoch > 0 and state.timestamp.batch_in_epoch in (2, 3))
    assert state.timestamp.batch == 20


def draws_where(place: str) -> pl.Algorithm:
    """Noise on the inputs, of a generator of the host or the device, or of the global ones under a seed or without."""

    def noise(state: pl.State) -> pl.State:
        inputs, targets = state.batch
        path, device = (state.seed, "noise", state.timestamp.batch), state.device
        if place == "host":
            drawn = torch.rand(inputs.shape, generator=pl.random.generator(*path)).to(device)
        elif place == "device":
            drawn = torch.rand(inputs.shape, device=device, generator=pl.random.generator(*path, device=device))
        else:
            seeding = pl.random.seeded(pl.random.derive(*path), device) if place == "both" else nullcontext()
            with seeding:
                drawn = torch.rand_like(inputs) + torch.rand(inputs.shape).to(device)
        return state.replace(batch=(inputs + drawn, targets))

    return pl.Algorithm("noise", {Event.BEFORE_TRAIN_BATCH: noise})


def test_what_a_compiled_algorithm_draws_is_what_an_eager_one_draws() -> None:
    for place in ("host", "device", "both", "global"):
        with interpreted():
            found, wanted = (
                run(None, None, [draws_where(place)], watch={Event.EPOCH_END}, compile=compiled)
                for compiled in (True, False)
            )
        close(found.params, wanted.params, 1e-5)


def test_recordings_share_a_stream_and_memory_and_nothing_else_is_drawn_meanwhile(monkeypatch: Any) -> None:
    """Torch's own stream is of the device that recorded first, and records nothing on another one."""
    asked, had_turn, real = list[Any](), list[bool](), torch.cuda.graph

    def take_turn() -> None:
        had_turn.append(rng_lock.acquire(blocking=False))
        if had_turn[-1]:
            rng_lock.release()

    def in_another_thread() -> None:
        thread = threading.Thread(target=take_turn)
        thread.start()
        thread.join()

    def graph(*given: Any, **options: Any) -> Any:
        asked.append((options["stream"], options["pool"]))
        in_another_thread()
        return real(*given, **options)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with interpreted():
        pl.run(compiled(evaluators=points(4, size=8, seed=1)))
        (stream, pool), *others = asked
        assert others
        assert all(each[0] is stream and each[1] == pool for each in others)
        assert stream.device_index == torch.cuda.current_device()
        pl.run(compiled())
    assert asked[-1][1] != pool
    assert not any(had_turn)
    in_another_thread()
    assert had_turn[-1]


def test_a_recording_after_the_last_one_went_is_in_a_pool_of_its_own() -> None:
    """Torch 2.11 refuses to record in one whose recordings are all gone."""
    recorder = replay._Recorder(torch.device("cuda", torch.cuda.current_device()))
    number = torch.zeros(2, device="cuda")
    for _ in range(2):
        play, (found,) = recorder(lambda tensors: [tensors[0] + 1], [number])
        play()
        assert found.tolist() == [1.0, 1.0]
        del play, found


@torch.library.custom_op("pure_loop_tests::waits", mutates_args=())
def waits(images: Tensor) -> Tensor:
    return images * float(images.sum() > -1e9)


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)
UNSAFE = torch.library.Library("pure_loop_gpu_tests", "DEF")
UNSAFE.define("counted(Tensor images) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
UNSAFE.impl("counted", torch.clone, "CompositeExplicitAutograd")


@pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda _: torch.zeros(()))
def counts(state: pl.State) -> pl.State:
    """Its memory is on the host."""
    return state.remember("counts", state.algorithm_state["counts"] + 1)


def looks_at_a_mask(outputs: Tensor, targets: Tensor) -> Tensor:
    """The host does, which no recording can."""
    return cross_entropy(outputs, targets) + waits(outputs).mean()


def says_that_it_must_not(outputs: Tensor, targets: Tensor) -> Tensor:
    """It counts its calls, it may be, which a recording makes once."""
    entropy = cross_entropy(outputs, targets)
    return entropy + 0 * torch.ops.pure_loop_gpu_tests.counted(entropy.detach())


def has_a_number_in_python(outputs: Tensor, targets: Tensor) -> Tensor:
    """Which is no second device."""
    return cross_entropy(outputs, targets) * torch.tensor(2.0)


RECORDED = "launched as one CUDA graph"


UNRECORDED: list[tuple[dict[str, Any], str | None]] = [
    ({"algorithms": [counts]}, None),
    ({"loss": looks_at_a_mask}, "can't be a CUDA graph"),
    ({"loss": says_that_it_must_not}, "CUDA can't record pure_loop_gpu_tests.counted"),
    ({"loss": has_a_number_in_python}, RECORDED),
]


@pytest.mark.parametrize(("options", "says"), UNRECORDED, ids=["memory on the host", "a wait", "refuses", "numbers"])
def test_what_can_not_be_recorded_is_launched_kernel_by_kernel(options: Any, says: str | None, notes: Any) -> None:
    with interpreted():
        found = pl.run(compiled(**options))
        assert (RECORDED in notes.text) == (says == RECORDED)
        assert says is None or says in notes.text
        assert_same(found, launched(**options), "as it is and kernel by kernel")


def test_parameters_in_half_precision() -> None:
    """For which torch's kernel that looks for NaN isn't there on a GPU."""
    data = [(inputs.bfloat16(), targets) for inputs, targets in points(4, size=8)]
    state = run(noisy().bfloat16(), data, max_duration="1ep")
    assert {each.dtype for each in state.params.values()} == {torch.bfloat16}
    data[2] = (data[2][0] * float("nan"), data[2][1])
    with pytest.raises(pl.errors.NonFiniteError, match="batch 2 "):
        run(noisy().bfloat16(), data, max_duration="1ep")
