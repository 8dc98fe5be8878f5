"""Files as Composer and torch.save write them, read without Composer: what of them becomes a State, what is refused."""

from __future__ import annotations

import collections
import datetime
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, CheckpointNotFoundError, ResumeError
from tests.support.problem import fit, mlp, points
from tests.support.refused import Refusal, check, rows

PAGE = Path(pl.__file__).parents[1] / "docs" / "coming-from" / "composer.md"
COUNTS = {"epoch": 1, "batch": 3, "sample": 12, "token": 0, "iteration": 0, "epoch_in_iteration": 1}
CLOCK = {"total_wct": datetime.timedelta(seconds=9.5), "epoch_wct": datetime.timedelta(0)}
DECAY, PEAK = 0.1, 0.05


def content(module: nn.Module, prefix: str = "module.", **optimizers: Any) -> dict[str, Any]:
    """What Composer gives to torch.save."""
    weights = {prefix + name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    seeds = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    state = {"model": weights, "optimizers": optimizers, "timestamp": {"Timestamp": {**COUNTS, **CLOCK}}}
    return {"state": state | {"schedulers": {}, "rank_zero_seed": 17}, "rng": [seeds, np.float64(0.5)]}


def decoupled(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A step of Composer's decoupled classes, which multiply by 1 - weight_decay * lr / initial_lr."""
    (group,) = optimizer.param_groups
    group["lr"] = rate
    with torch.no_grad():
        for param in group["params"]:
            param.mul_(1 - DECAY * rate / PEAK)
    optimizer.step()


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float], data: Any) -> None:
    for (inputs, targets), rate in zip(data, rates, strict=True):
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        decoupled(optimizer, rate)


@pytest.mark.parametrize("kind", ["DecoupledAdamW", "DecoupledSGDW"])
@settings(max_examples=8)
@given(by_name=st.booleans(), prefix=st.sampled_from(["", "module.", "model."]), seed=st.integers(0, 99))
def test_a_run_of_composer_goes_on(
    kind: str, by_name: bool, prefix: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three steps by hand, as Composer's classes compute them, and three more by fit: as six by hand."""
    module, data, rates = mlp(seed), points(6, seed=seed), [PEAK * (1 - step / 10) for step in range(6)]
    rate = pl.schedules.linear(PEAK, 0.0, "10ba")
    options: Any = {"lr": rate, "weight_decay": DECAY / PEAK * rate, "independent_decay": True}
    by_hand: torch.optim.Optimizer
    if kind == "DecoupledAdamW":
        by_hand, optimizer = torch.optim.AdamW(module.parameters(), lr=PEAK, weight_decay=0), pl.optim.adamw(**options)
    else:
        by_hand = torch.optim.SGD(module.parameters(), lr=PEAK, momentum=0.9)
        optimizer = pl.optim.sgd(momentum=0.9, **options)
    trained(module, by_hand, rates[:3], data[:3])
    saved: Any = by_hand.state_dict()
    saved["param_groups"][0] |= {"weight_decay": DECAY, "initial_lr": PEAK}
    if by_name:
        names = [prefix + name for name, _ in module.named_parameters()]
        saved = {
            "state": {names[number]: memory for number, memory in saved["state"].items()},
            "param_groups": [{**saved["param_groups"][0], "params": names}],
        }
    path = tmp_path_factory.mktemp("composer") / "ep1-ba3-rank0.pt"
    torch.save(content(module, prefix, **{kind: saved}), path)
    rename = {prefix: ""} if prefix else None
    start = pl.from_composer(path, mlp(), optimizer=optimizer, rename=rename)
    assert [note.batch for note in start.notes] == [3] * bool(rename)
    assert (start.timestamp.batch, start.timestamp.sample, start.timestamp.total_seconds) == (3, 12, 9.5)
    end = pl.run(fit(start, data[3:], optimizer=optimizer, max_duration="6ba"))
    trained(module, by_hand, rates[3:], data[3:])
    for name, param in module.named_parameters():
        torch.testing.assert_close(end.params[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_what_is_not_taken_over_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = mlp()
    path = tmp_path / "a.pt"
    torch.save(content(module, "", SGD=torch.optim.SGD(module.parameters()).state_dict()), path)
    source = pl.from_composer(path)
    assert source.rest == ("rng", "state/schedulers", "state/rank_zero_seed")
    assert (list(source.weights), list(source.optimizers)) == (list(module.state_dict()), ["SGD"])
    pl.from_composer(path, module)
    assert "not taken over: rng, state/schedulers, state/rank_zero_seed, the state of SGD (for it, optim" in caplog.text
    assert pl.from_composer(path, module, weights_only=True).timestamp == pl.Timestamp()


@pytest.mark.parametrize("key", [None, "model", "model_state_dict", "state_dict"])
def test_plain_files(key: str | None, tmp_path: Path) -> None:
    module = mlp(3)
    torch.save(module.state_dict() if key is None else {key: module.state_dict(), "epoch": 4}, tmp_path / "a.pt")
    state = pl.from_composer(tmp_path / "a.pt", mlp())
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in state.params.items())
    assert pl.from_composer(tmp_path / "a.pt").rest == (() if key is None else ("epoch",))


def test_times_of_composer_are_read_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Time", (), {"__module__": "composer.core.time"})
    for name in ("composer", "composer.core", "composer.core.time"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules["composer.core.time"].Time = kind  # type: ignore[attr-defined]
    value = kind()
    value.value = 3  # type: ignore[attr-defined]
    torch.save({**content(mlp(), ""), "max_duration": value}, tmp_path / "a.pt")
    monkeypatch.undo()
    assert pl.from_composer(tmp_path / "a.pt", mlp()).timestamp.epoch == 1


RAN: list[str] = []


class Hostile:
    def __reduce__(self) -> Any:
        return RAN.append, ("code of the file",)


def file(value: Any, how: Callable[[Any, Any], object] = torch.save) -> str:
    how(value, "a.pt")
    return "a.pt"


def of(module: nn.Module | None = None, saved: Any = None, **options: Any) -> Any:
    return pl.from_composer(
        content(mlp(), "") if saved is None else saved, mlp() if module is None else module, **options
    )


ADAM = torch.optim.AdamW(mlp().parameters(), weight_decay=0.1).state_dict()
WRONG, TYPE = ArgumentError, ArgumentTypeError
SUITABLE = pl.optim.adamw(weight_decay=0.1)
REFUSED = [
    Refusal("code", lambda: pl.from_composer(file({**content(mlp()), "x": Hostile()})), CheckpointError,
            ("a.pt isn't opened: it needs getattr", "trusted", "pl.from_composer(torch.load('a.pt', map_loc")),
    Refusal("a module", lambda: pl.from_composer(file(mlp())), CheckpointError, ("torch.nn.modules.container.Seq",)),
    Refusal("no file", lambda: pl.from_composer("b.pt"), CheckpointNotFoundError, ("b.pt",)),
    Refusal("other bytes", lambda: pl.from_composer(file(b"hello", lambda value, path: Path(path).write_bytes(value))),
            CheckpointError, ("a.pt can't be read",)),
    Refusal("a folder", lambda: pl.from_composer("."), CheckpointError, ("dcp_to_torch_save('.', 'whole.pt')",)),
    Refusal("no path", lambda: pl.from_composer(3), TYPE, ("write a path",)),  # type: ignore[call-overload]
    Refusal("no weights", lambda: pl.from_composer({"epoch": 3}), CheckpointError, ("no weights", "['epoch']")),
    Refusal("no module", lambda: of(3), TYPE, ("torch.nn.Module",)),  # type: ignore[arg-type]
    Refusal("no dict", lambda: pl.from_composer(file(torch.ones(3))), CheckpointError, ("has a Tensor",)),
    Refusal("counts", lambda: of(saved={"state": {"model": mlp().state_dict(), "timestamp": {"batch": -1}}}),
            CheckpointError, ("timestamp", "-1")),
    *(Refusal(f"prefix {prefix}", lambda prefix=prefix: of(saved=content(mlp(), prefix)), ResumeError,
              (f"from_composer(saved, model, rename={{{prefix!r}: ''}})",)) for prefix in ("module.", "_orig_mod.a.")),
    Refusal("a prefix, and more",
            lambda: of(saved={"m.metric": torch.ones(1), **content(mlp(), "n.")["state"]["model"]}), ResumeError,
            ("pl.from_composer(saved, model, rename={'n.': ''}, exclude=['m.*'])",)),
    Refusal("a prefix in the model", lambda: of(nn.Sequential(collections.OrderedDict(net=mlp()))), ResumeError,
            ("pl.from_composer(saved, model, rename={'': 'net.'})",)),
    Refusal("another head", lambda: of(saved={**mlp().state_dict(), "2.weight": torch.ones(7, 8)}), ResumeError,
            ("'2.weight' has shape (7, 8) in the file", "pl.from_composer(saved, model, exclude=['2.weight'])")),
    Refusal("a weight less", lambda: of(saved={"0.weight": torch.ones(8, 4)}), ResumeError,
            ("lacks", "exclude=['0.bias', '2.*']")),
    Refusal("another head, with moments",
            lambda: of(saved={**mlp().state_dict(), "2.weight": torch.ones(7, 8)}, optimizer=SUITABLE), ResumeError,
            ("pl.from_composer(saved, model, optimizer=optimizer, exclude=['2.weight'])",)),
    Refusal("moments and weights alone", lambda: of(optimizer=SUITABLE, weights_only=True), WRONG, ("write one of",)),
    Refusal("no moments", lambda: of(optimizer=SUITABLE), ResumeError, ("no optimizer", "begins anew")),
    Refusal("coupled decay", lambda: of(saved=content(mlp(), "", DecoupledAdamW=ADAM), optimizer=SUITABLE), WRONG,
            ("pl.optim.adamw(..., independent_decay=True)", "DecoupledAdamW in the dict")),
    Refusal("another class", lambda: of(saved=content(mlp(), "", AdamW=ADAM), optimizer=pl.optim.sgd(weight_decay=0.2)),
            WRONG, ("weight_decay=0.1", "of AdamW")),
]  # fmt: skip


@rows(REFUSED)
def test_it_is_refused(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(refusal)
    assert RAN == []


def test_the_line_of_a_refusal_reads_the_file(tmp_path: Path) -> None:
    torch.save({**content(mlp(5), ""), "x": Odd()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"Odd") as caught:
        pl.from_composer(tmp_path / "a.pt", mlp())
    line = str(caught.value)[str(caught.value).index("pl.from_composer(") :]
    state = eval(line, {"pl": pl, "torch": torch, "model": mlp()})
    assert torch.equal(state.params["0.weight"], mlp(5).state_dict()["0.weight"])


class Odd:
    """A class that a file names."""


# As Composer 0.32 has them; an argument that fit has under the same name is its own.
ARGUMENTS = """
train_dataloader_label train_subset_num_batches spin_dataloaders algorithm_passes optimizers schedulers
scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_subset_num_batches progress_bar log_to_console
console_stream console_log_interval log_traces auto_log_hparams load_object_store load_weights_only
load_strict_model_weights load_progress_bar load_ignore_keys load_exclude_algorithms save_folder save_filename
save_latest_filename save_overwrite save_interval save_weights_only save_ignore_keys save_num_checkpoints_to_keep
save_metrics parallelism_config precision_config device_train_microbatch_size accumulate_train_batch_on_tokens
deterministic_mode dist_timeout ddp_sync_strategy profiler python_log_level compile_config
"""
NAMES = """
model train_dataloader max_duration algorithms callbacks loggers run_name seed device eval_interval load_path
autoresume precision Alibi AugMix BlurPool ChannelsLast ColOut CutMix CutOut EMA Factorize GatedLinearUnits
GhostBatchNorm GradientClipping GyroDropout LabelSmoothing LayerFreezing LowPrecisionGroupNorm LowPrecisionLayerNorm
MixUp NoOpModel ProgressiveResizing RandAugment SAM SelectiveBackprop SeqLengthWarmup SqueezeExcite StochasticDepth
SWA WeightStandardization ActivationMonitor CheckpointSaver EarlyStopper ExportForInferenceCallback FreeOutputs
Generate ImageVisualizer LoadCheckpoint LRMonitor MemoryMonitor MemorySnapshot MLPerfCallback NaNMonitor OOMObserver
OptimizerMonitor RuntimeEstimator SpeedMonitor SystemMetricsMonitor ThresholdStopper CometMLLogger ConsoleLogger
FileLogger InMemoryLogger MLFlowLogger MosaicMLLogger NeptuneLogger ProgressBarLogger RemoteUploaderDownloader
SlackLogger TensorboardLogger WandBLogger StepScheduler MultiStepScheduler ConstantScheduler LinearScheduler
ExponentialScheduler CosineAnnealingScheduler CosineAnnealingWarmRestartsScheduler PolynomialScheduler
MultiStepWithWarmupScheduler ConstantWithWarmupScheduler LinearWithWarmupScheduler CosineAnnealingWithWarmupScheduler
PolynomialWithWarmupScheduler MIoU Dice CrossEntropy LossMetric MAP MaskedAccuracy LanguageCrossEntropy
LanguagePerplexity BinaryF1Score soft_cross_entropy binary_cross_entropy_with_logits DiceLoss DecoupledSGDW
DecoupledAdamW HuggingFaceModel ComposerModel ComposerClassifier stop_training export_for_inference Profiler total_wct
epoch_wct batch_wct timestamp local_rank world_size node_rank
"""


def test_the_page_has_each_name_of_composer() -> None:
    page = PAGE.read_text()
    assert [
        name
        for name in (ARGUMENTS + NAMES).split()
        if f"`{name}" not in page and not re.search(rf"`.*\b{name}\b.*`", page)
    ] == []


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_fit_says_what_stands_for_an_argument_of_composer(name: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument '{name}': write "):
        fit(**{name: 1})


def test_numbers_of_the_page() -> None:
    """The rows of this library, of a weight that is t after batch t."""
    data = [(torch.zeros(1), torch.zeros(1))] * 4

    def values(value: Callable[[pl.State], Any], *algorithms: Any, event: pl.Event = pl.Event.BATCH_END) -> list[Any]:
        settings: Any = {"loss": lambda outputs, targets: -outputs.sum(), "optimizer": pl.optim.sgd(lr=1.0)}
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        stream = pl.fit(model, data, max_duration="2ep", algorithms=algorithms, **settings)
        return [value(state) for reached, state in stream if reached is event]

    assert values(lambda state: state.timestamp.elapsed) == [batch / 8 for batch in range(1, 9)]
    averages = values(
        lambda state: float(pl.algorithms.averaged(state).params["bias"]), pl.algorithms.ema("1ba", start="2ba")
    )
    assert averages[:4] == [1, 1.5, 2.25, 3.125]
    rate = pl.schedules.constant(0.05)
    weight = pl.State.create(nn.Linear(1, 1, bias=False)).replace(params={"weight": torch.ones(1, 1)})
    for options, after in (
        ({}, 0.9995),
        ({"weight_decay": 0.01 / 0.1 * rate, "independent_decay": True}, 0.995),
        ({"weight_decay": 0.01, "independent_decay": True}, 0.99),
    ):
        optimizer = pl.optim.adamw(**{"lr": rate, "weight_decay": 0.01, **options})  # type: ignore[arg-type]
        zeros = [(torch.zeros(1, 1), torch.zeros(1, 1))]
        end = pl.run(pl.fit(weight, zeros, loss=nn.functional.mse_loss, optimizer=optimizer, max_duration="1ba"))
        assert float(end.params["weight"]) == pytest.approx(after, abs=1e-7)
