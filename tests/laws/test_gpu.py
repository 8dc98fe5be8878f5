"""The laws on a CUDA device, steps as CUDA graphs, and that no step waits for it. Skipped where there is none."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted, replay
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, expected
from pure_loop.random.seeds import rng_lock
from pure_loop.stages import engine, nonfinite, ownership
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.workspace import Workspace
from pure_loop.testing import Case, cases, check_algorithm, check_loop, laws
from tests.support.models import batches, mlp
from tests.support.streams import assert_same, assert_same_stream, leaves

# Laws are tried on sentences, too, whose cross-entropy has no deterministic kernel on a GPU.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have a deterministic impl:UserWarning")]

PLAN = Plan(
    batches=(6, 4, 6),
    max_duration="2ep",
    microbatch_size=4,
    evaluators={"val": EvaluatorPlan(batches=(2, 3), interval="2ba")},
)
CASES = [Case(plan=PLAN, problem="mlp", precision=precision) for precision in ("fp32", "amp_bf16", "amp_fp16")]
IDS = [case.precision for case in CASES]


def on_device(model_or_state: Any, data: Any, **arguments: Any) -> Any:
    return pl.fit(model_or_state, data, **{**arguments, "device": "cuda"})


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


@settings(max_examples=25)
@given(cases())
def test_events_are_those_of_the_specification(case: Case) -> None:
    laws.order(None, case, fit=on_device)


def test_the_loop_keeps_its_laws_on_the_device() -> None:
    assert check_loop(on_device, max_examples=5).ok


@pytest.mark.parametrize("make", [pl.algorithms.sam, lambda: pl.algorithms.ema(half_life="2ba")])
def test_algorithms_keep_their_laws_on_the_device(make: Any) -> None:
    assert check_algorithm(make, fit=on_device, max_examples=3).ok


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_everything_of_a_state_is_on_the_device(case: Case) -> None:
    for event, state in case.run(fit=on_device):
        if event is Event.BATCH_END:
            tensors = {path: leaf for path, leaf in leaves(state).items() if isinstance(leaf, torch.Tensor)}
            elsewhere = [path for path, leaf in tensors.items() if leaf.device.type != "cuda"]
            assert not elsewhere


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_streams_are_deterministic_whatever_the_devices_random_state(case: Case) -> None:
    streams = []
    for seed in (1, 2):
        torch.cuda.manual_seed(seed)
        before = torch.cuda.get_rng_state()
        streams.append(case.run(fit=on_device))
        assert torch.equal(torch.cuda.get_rng_state(), before), "the device's random state changed"
    assert_same_stream(streams[1], streams[0], "with another random state")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_going_on_is_exact(case: Case) -> None:
    laws.resumption(None, case, fit=on_device)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_yielded_state_never_changes(case: Case) -> None:
    laws.value(None, case, fit=on_device)
    laws.observer_invariance(None, case, fit=on_device)


def test_dropout_differs_between_batches_and_is_that_of_the_batch() -> None:
    def masks(start: Any) -> list[torch.Tensor]:
        data = [(torch.ones(64, 4), torch.zeros(64, dtype=torch.int64))] * 4
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
        stream = on_device(
            start or model, data, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.0), max_duration="4ba"
        )
        return [state.outputs for event, state in stream if event is Event.AFTER_FORWARD]

    torch.manual_seed(0)
    first = masks(None)
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


def test_a_state_kept_on_the_cpu_resumes_on_the_device() -> None:
    case = CASES[0]
    kept = next(s for e, s in case.run() if e is Event.BATCH_END and s.timestamp.batch == 2)
    last = case.run(fit=on_device, start=kept)[-1][1]
    assert last.device.type == "cuda"
    wanted = case.run()[-1][1]
    assert last.timestamp.batch == wanted.timestamp.batch


def test_half_precision_is_that_of_the_loop_by_hand() -> None:
    data = batches((8, 8), seed=1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    state = pl.run(
        pl.fit(
            model,
            data,
            loss=functional.cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1, momentum=0.9),
            max_duration="4ep",
            precision="amp_fp16",
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in data * 4:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.params[name], parameter.detach(), rtol=1e-5, atol=1e-5)
    assert float(state.loss_scale) == scaler.get_scale()


STEP = (Event.AFTER_DATALOADER, Event.BATCH_END)


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
@pytest.mark.parametrize(
    "optimizer", [pl.optim.adamw(lr=0.01), pl.optim.sgd(lr=0.01, momentum=0.9)], ids=lambda o: o.name
)
def test_a_step_never_waits_for_the_device(optimizer: Any, precision: str, nonfinite: str) -> None:
    """From one batch to the next nothing is read from the device, and nothing is copied to it but the batch."""
    pinned = [tuple(part.pin_memory() for part in batch) for batch in batches((8, 8, 8, 8, 8), seed=0)]
    stream = on_device(
        mlp(),
        pinned,
        loss=functional.cross_entropy,
        optimizer=optimizer,
        max_duration="2ep",
        microbatch_size=4,
        precision=precision,
        nonfinite=nonfinite,
        clip_grad=1.0,
        algorithms=[pl.algorithms.ema(half_life="10ba"), pl.algorithms.label_smoothing(0.1)],
        callbacks=[pl.callbacks.SpeedMonitor()],
        loggers=[pl.loggers.InMemoryLogger()],
    )
    kept = []
    try:
        for event, state in stream:
            if event is Event.BATCH_END:
                kept.append(state.loss)
                # The first step may set things up (kernels, workspaces); the first two are compared by value.
                torch.cuda.set_sync_debug_mode("error" if state.timestamp.batch_in_epoch in (3, 4) else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    state.check_finite()
    assert len(kept) == 10


def test_the_debug_mode_sees_a_wait() -> None:
    """The test above can fail."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_loaders_move_each_batch_once() -> None:
    loader = DataLoader(
        TensorDataset(torch.randn(12, 4), torch.randint(3, (12,))), batch_size=4, shuffle=True, pin_memory=True
    )
    stream = on_device(mlp(), loader, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    pairs = list(stream)
    assert [event for event, _ in pairs] == expected(Plan(batches=(4, 4, 4), max_duration="1ep"))
    for event, state in pairs:
        if state.batch is not None and event not in BOUNDARIES:
            assert state.batch[0].device.type == "cuda"


def test_memory_is_flat_on_the_device() -> None:
    data = batches((8,) * 4, seed=0)
    stream = on_device(
        mlp(),
        data,
        loss=functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=0.01),
        max_duration="200ba",
        microbatch_size=4,
    )
    used, kept = [], []
    for event, state in stream:
        if event is Event.BATCH_END:
            kept.append(state.loss)
            if state.timestamp.batch % 40 == 0:
                used.append(torch.cuda.memory_allocated() - 512 * len(kept))
    assert max(used[1:]) - used[1] <= 4096, used


@pytest.mark.parametrize(
    "settings",
    [{}, {"nonfinite": "skip"}, {"precision": "amp_fp16"}, {"microbatch_size": 4, "clip_grad": 1.0}, {"compile": True}],
    ids=str,
)
def test_a_loss_on_the_host_trains_a_model_on_the_device(settings: Any) -> None:
    def trained(loss: Any) -> pl.State:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = pl.optim.sgd(lr=0.1)
        with interpreted():
            data = batches((8,) * 4, seed=0)
            return pl.run(on_device(model, data, loss=loss, optimizer=optimizer, max_duration="2ep", **settings))

    torch.manual_seed(0)
    found = trained(lambda outputs, y: functional.cross_entropy(outputs.float().cpu(), y.cpu()))
    torch.manual_seed(0)
    wanted = trained(lambda outputs, y: functional.cross_entropy(outputs.float(), y))
    torch.testing.assert_close(dict(found.params), dict(wanted.params), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compile": True, "watch": {Event.BATCH_END}},
        {"compile": True, "watch": {Event.AFTER_LOSS}},
        {"compile": True, "watch": frozenset(), "steps_per_call": 4},
    ],
    ids=str,
)
def test_a_loss_on_the_host_that_is_not_finite_is_told(settings: Any) -> None:
    data = batches((8,) * 4, seed=0)
    data[2] = (data[2][0] * float("nan"), data[2][1])

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.float().cpu(), y.cpu())

    settings = {"loss": loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep", **settings}
    with interpreted(), pytest.raises(pl.NonFiniteError, match="batch 2"):
        pl.run(on_device(mlp(), data, **settings))


@pytest.mark.parametrize("part", [0, 1], ids=["on the device", "on the host"])
def test_outputs_on_two_devices_of_which_the_loss_takes_one(part: int) -> None:
    """The backward of a compiled forward takes zeros for the other, which lie where that lies."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = self.layers(x)
            return outputs, outputs.cpu() * 2.0

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs[part], y.to(outputs[part].device))

    def trained(**settings: Any) -> pl.State:
        torch.manual_seed(0)
        stream = on_device(
            Both(),
            batches((8,) * 4, seed=0),
            loss=loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="2ep",
            watch={Event.AFTER_FORWARD},
            **settings,
        )
        return pl.run(stream)

    with interpreted():
        found, wanted = trained(compile=True), trained()
    torch.testing.assert_close(dict(found.params), dict(wanted.params))


def compiled(watch: Any = frozenset({Event.BATCH_END}), **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    settings.setdefault("optimizer", pl.optim.adamw(lr=pl.schedules.cosine("4ep", peak=0.01)))
    settings.setdefault("algorithms", [pl.algorithms.ema(half_life="5ba")])
    loss = settings.pop("loss", functional.cross_entropy)
    data = settings.pop("data", batches((8,) * 5, seed=0))
    return on_device(model, data, loss=loss, max_duration="4ep", watch=watch, compile=True, **settings)


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
    stream = on_device(
        mlp(),
        batches((8,) * 5, seed=0),
        loss=functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="4ep",
        microbatch_size=2,
        watch=watch,
    )
    pl.run(stream)
    assert alone == [True] * len(alone)
    assert len(alone) >= 60


@pytest.mark.parametrize(
    "settings",
    [{}, *({"compile": True, "watch": {event}} for event in (Event.BATCH_END, Event.AFTER_FORWARD))],
    ids=str,
)
def test_the_backward_runs_in_the_thread_of_the_loop(settings: Any) -> None:
    """Autograd's own have the gradients a moment longer, in which they aren't alone, and know nothing of a tracer."""
    threads = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
            return outputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return gradient

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(Noting.apply(outputs), targets)

    settings = {"loss": loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", **settings}
    with interpreted():
        pl.run(on_device(mlp(), batches((8,), 0), **settings))
    assert threads
    assert set(threads) == {threading.get_ident()}


@pytest.fixture(params=["operation by operation", "compiled"])
def graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "compiled" and importlib.util.find_spec("triton") is None:
        pytest.skip("torch's compiler makes kernels for a GPU with triton, which is not installed")
    if request.param == "compiled" and torch.cuda.get_device_name() == "a simulated GPU":
        pytest.skip("a simulated GPU runs no kernels: see tests/compile/test_triton.py")
    with interpreted() if request.param == "operation by operation" else nullcontext():
        yield


def launched(**settings: Any) -> pl.State:
    """The same, kernel by kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pure_loop.compile.replay.Recorders.of", lambda self, device: None)
        return pl.run(compiled(**settings))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "settings",
    [{}, {"nonfinite": "skip"}, {"precision": "amp_fp16"}, {"microbatch_size": 4, "clip_grad": 1.0}, {"watch": None}],
    ids=str,
)
def test_steps_as_a_cuda_graph_are_those_that_are_launched_kernel_by_kernel(settings: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="pure_loop.compile"):
        found = pl.run(compiled(**settings))
    assert "launched as one CUDA graph" in caplog.text
    assert "can't be a CUDA graph" not in caplog.text
    assert_same(found, launched(**settings), "as a CUDA graph and kernel by kernel")


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


@pytest.mark.parametrize("place", ["host", "device", "both", "global"])
def test_what_a_compiled_algorithm_draws_is_what_an_eager_one_draws(place: str) -> None:
    def trained(**options: Any) -> Any:
        torch.manual_seed(0)
        settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
        settings |= {"max_duration": "2ep", "watch": {Event.EPOCH_END}, "algorithms": [draws_where(place)]}
        return dict(pl.run(on_device(nn.Linear(4, 3), batches((8,) * 4, seed=0), **settings, **options)).params)

    with interpreted():
        torch.testing.assert_close(trained(compile=True), trained())


@pytest.mark.usefixtures("graphs")
def test_what_was_kept_of_steps_as_a_cuda_graph_never_changes() -> None:
    kept = []
    for _, state in compiled():
        kept.append((state.loss, float(state.loss)))
        if state.timestamp.batch == 10:
            params = state.params, {name: tensor.cpu() for name, tensor in state.params.items()}
    assert [loss.item() for loss, _ in kept] == [number for _, number in kept]
    assert all(torch.equal(params[0][name].cpu(), numbers) for name, numbers in params[1].items())


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip"}, {"precision": "amp_fp16"}], ids=str)
def test_compiled_steps_write_where_their_numbers_are(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    real = Ownership.writable_or_copies

    def own(this: Any, tensors: list[torch.Tensor], alone: Any) -> list[torch.Tensor]:
        given = real(this, tensors, alone)
        copied.append(given is not tensors)
        return given

    monkeypatch.setattr(Ownership, "writable_or_copies", own)
    for _, _state in compiled(**settings):
        pass
    assert copied == [True] + [False] * 19


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "optimizer", [pl.optim.adamw(lr=0.01), pl.optim.sgd(lr=0.01, momentum=0.9)], ids=lambda o: o.name
)
def test_a_compiled_step_never_waits_for_the_device(optimizer: Any) -> None:
    pinned = [tuple(part.pin_memory() for part in batch) for batch in batches((8,) * 5, seed=0)]
    try:
        for _, state in compiled(data=pinned, optimizer=optimizer, clip_grad=1.0):
            # In the first epoch it is recorded.
            quiet = state.timestamp.epoch > 0 and state.timestamp.batch_in_epoch in (2, 3)
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.timestamp.batch == 20


def test_the_recordings_of_a_loop_share_a_stream_of_their_device_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own stream is of the device that recorded first, and records nothing on another one."""
    asked, real = [], torch.cuda.graph

    def graph(*given: Any, **options: Any) -> Any:
        asked.append((options["stream"], options["pool"]))
        return real(*given, **options)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with interpreted():
        pl.run(compiled(evaluators=batches((8,) * 4, seed=1)))
        (stream, pool), *others = asked
        assert others
        assert all(each[0] is stream and each[1] == pool for each in others)
        assert stream.device_index == torch.cuda.current_device()
        pl.run(compiled())
    assert asked[-1][1] != pool


def test_a_recording_after_the_last_one_went_is_in_a_pool_of_its_own() -> None:
    """Torch 2.11 refuses to record in one whose recordings are all gone."""
    recorder = replay._Recorder(torch.device("cuda", torch.cuda.current_device()))
    number = torch.zeros(2, device="cuda")
    for _ in range(2):
        play, (found,) = recorder(lambda tensors: [tensors[0] + 1], [number])
        play()
        assert found.tolist() == [1.0, 1.0]
        del play, found


def test_nothing_else_is_drawn_or_recorded_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would take it for a part of the recording."""
    had_turn: list[bool] = []
    real = torch.cuda.graph

    def take_turn() -> None:
        had_turn.append(rng_lock.acquire(blocking=False))
        if had_turn[-1]:
            rng_lock.release()

    def in_another_thread() -> None:
        thread = threading.Thread(target=take_turn)
        thread.start()
        thread.join()

    def graph(*given: Any, **options: Any) -> Any:
        in_another_thread()
        return real(*given, **options)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with interpreted():
        pl.run(compiled())
    in_another_thread()
    assert had_turn == [False, True]


def test_memory_on_the_host_is_not_recorded(caplog: Any) -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda _: torch.zeros(()))
    def counts(state: pl.State) -> pl.State:
        return state.remember("counts", state.algorithm_state["counts"] + 1)

    with interpreted(), caplog.at_level("INFO", logger="pure_loop.compile"):
        found = pl.run(compiled(algorithms=[counts]))
        assert "launched as one CUDA graph" not in caplog.text
        assert_same(found, launched(algorithms=[counts]), "of two devices and launched")


def test_what_waits_for_the_device_is_launched_kernel_by_kernel(caplog: Any) -> None:
    """A mask is looked at by the host, which no recording can."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets) + waits(outputs).mean()

    with interpreted():
        found = pl.run(compiled(loss=loss))
        assert_same(found, launched(loss=loss), "refused and launched")
    assert "can't be a CUDA graph" in caplog.text


@torch.library.custom_op("pure_loop_tests::waits", mutates_args=())
def waits(images: torch.Tensor) -> torch.Tensor:
    return images * float(images.sum() > -1e9)


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)


def test_a_recording_that_fails_leaves_those_before_it_and_after_it_be(caplog: Any) -> None:
    class WaitsInEvaluation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layers(inputs)
            return found if self.training else waits(found)

    def run() -> pl.State:
        settings: dict[str, Any] = {
            "watch": {Event.BATCH_END},
            "compile": True,
            "evaluators": {"val": batches((8,) * 4, seed=1)},
        }
        settings |= {"loss": functional.cross_entropy, "optimizer": pl.optim.adamw(lr=0.01)}
        torch.manual_seed(0)
        return pl.run(on_device(WaitsInEvaluation(), batches((8,) * 5, seed=0), max_duration="4ep", **settings))

    with interpreted():
        with caplog.at_level("INFO", logger="pure_loop.compile"):
            found = run()
        notes = ["can't" in each.message for each in caplog.records if "CUDA graph" in each.message]
        # A step is recorded in each epoch, because an evaluation shows its State; the first evaluation can't be.
        assert notes == [False, True, False, False, False]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pure_loop.compile.replay.Recorders.of", lambda self, device: None)
            assert_same(found, run(), "beside one that failed and kernel by kernel")


@pytest.mark.parametrize("optimizer", [pl.optim.adamw(lr=0.1), pl.optim.sgd(lr=0.1)], ids=lambda each: each.name)
def test_eager_steps_after_a_compiled_one_are_what_they_are_alone(optimizer: Any) -> None:
    """What is made while a step is traced, and has no numbers, is not kept."""
    nonfinite._ones.clear()

    def trained(**options: Any) -> pl.State:
        settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": optimizer, "max_duration": "1ep"}
        torch.manual_seed(0)
        return pl.run(on_device(nn.Linear(4, 3), batches((8,) * 3, seed=0), **settings, **options))

    with interpreted():
        compiled = trained(compile=True, watch={Event.EPOCH_END})
    eager = trained()
    assert all(type(each) is torch.Tensor for each in leaves(eager).values() if isinstance(each, torch.Tensor))
    torch.testing.assert_close(dict(eager.params), dict(compiled.params))


def test_numbers_written_in_python_are_no_second_device(caplog: Any) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets) * torch.tensor(2.0)

    with interpreted(), caplog.at_level("INFO", logger="pure_loop.compile"):
        found = pl.run(compiled(loss=loss))
        assert "launched as one CUDA graph" in caplog.text
        assert_same(found, launched(loss=loss), "as a CUDA graph and kernel by kernel")


UNSAFE = torch.library.Library("pure_loop_gpu_tests", "DEF")
UNSAFE.define("counted(Tensor images) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
UNSAFE.impl("counted", torch.clone, "CompositeExplicitAutograd")


def test_what_says_that_it_must_not_be_recorded_is_not(caplog: Any) -> None:
    """It counts its calls, it may be, which a recording makes once."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        entropy = functional.cross_entropy(outputs, targets)
        return entropy + 0 * torch.ops.pure_loop_gpu_tests.counted(entropy.detach())

    with interpreted(), caplog.at_level("INFO", logger="pure_loop.compile"):
        pl.run(compiled(loss=loss))
    assert "launched as one CUDA graph" not in caplog.text
    assert "CUDA can't record pure_loop_gpu_tests.counted" in caplog.text


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "nan"])
def test_parameters_in_half_precision(broken: bool) -> None:
    """For which torch's kernel that looks for NaN isn't there on a GPU."""
    data = [(inputs.bfloat16(), targets) for inputs, targets in batches((8,) * 4, seed=0)]
    if broken:
        data[2] = (data[2][0] * float("nan"), data[2][1])
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.01)}
    stream = on_device(mlp().bfloat16(), data, max_duration="1ep", **settings)
    with pytest.raises(pl.errors.NonFiniteError, match="batch 2 ") if broken else nullcontext():
        last = pl.run(stream)
        assert {each.dtype for each in last.params.values()} == {torch.bfloat16}
