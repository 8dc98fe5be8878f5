"""Explain: that it shows what will happen, and does nothing."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch

import pure_loop as pl
from pure_loop.algorithm import bind
from pure_loop.entry.explain import explain
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.uncounted import without_counts

E = pl.Event
DATA = points(6)


def shown_of(*args: Any, **options: Any) -> str:
    out = io.StringIO()
    options = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep", **options}
    assert explain(*(args or (mlp(), DATA)), file=out, **options) is None
    return out.getvalue()


def words(*args: Any, **options: Any) -> str:
    """Lines are wrapped."""
    return " ".join(shown_of(*args, **options).split())


def bound(shown: str) -> dict[E, list[tuple[str, str]]]:
    """From the printed text: what is bound at each event, in the order in which it stands there."""
    found, event = dict[E, Any](), None
    for line in shown.splitlines():
        name, *rest = line.split() or [""]
        if name in E.__members__:
            event, (name, *rest) = E[name], rest or [""]
        if event is not None and name in ("algorithm", "callback", "logger"):
            found.setdefault(event, []).append((name, rest[0]))
    return found


def ran(*_: Any) -> Any:
    raise AssertionError("ran")


Watcher: Any = type("Watcher", (pl.Callback,), {"batch_end": ran})
Printer: Any = type("Printer", (pl.Logger,), {"batch_end": ran})


def test_what_is_bound_stands_at_its_event_in_the_order_in_which_it_runs() -> None:
    events = (E.BEFORE_LOSS, E.AFTER_LOSS, E.BATCH_END, E.AFTER_DATALOADER)
    algorithms = [pl.Algorithm(name, {events: ran}) for name in "ab"]
    found = bound(shown_of(algorithms=algorithms, callbacks=[Watcher()], loggers=[Printer()]))
    for event, handlers in bind(algorithms).items():
        assert [name for kind, name in found[event] if kind == "algorithm"] == [each.algorithm for each in handlers]
    assert [name for _, name in found[E.AFTER_LOSS]] == ["b", "a"]
    others = [("callback", "Watcher"), ("callback", "Recorder"), ("logger", "Printer")]
    assert found[E.BATCH_END] == [("algorithm", "a"), ("algorithm", "b"), *others]


@pytest.mark.parametrize("options", [{}, {"iteration_length": "1ep"}, {"order": "2021"}], ids=str)
def test_the_events_are_those_of_a_run(options: dict[str, Any]) -> None:
    for evaluators in ({}, {"evaluators": DATA}):
        shown = shown_of(**options, **evaluators)
        named = {line.split()[0] for line in shown.splitlines() if line.split()}
        assert {event.name for event, _ in fit(data=DATA, **options, **evaluators)} == named & set(E.__members__)
    if "order" in options:
        assert shown.index("EVAL_END") < shown.rindex("EPOCH_END")


def test_resuming_says_from_where_and_has_no_init(tmp_path: Any) -> None:
    state = next(state for event, state in fit(data=DATA) if event is E.BATCH_CHECKPOINT)
    shown = shown_of(state, DATA)
    assert "BATCH_CHECKPOINT, epoch 0, batch 1" in shown
    assert any(line.split()[:1] == ["INIT"] for line in shown_of().splitlines())
    assert not any(line.split()[:1] == ["INIT"] for line in shown.splitlines())

    def starts(**options: Any) -> str:
        return words(**options).partition(" starts from ")[2].partition(" data ")[0]

    folder, weights = str(tmp_path), str(tmp_path / "weights.safetensors")
    assert starts() == ""
    assert starts(autoresume=folder).startswith("nothing:")
    trained = run(data=DATA, autoresume=folder, max_duration="1ep")
    path = pl.latest(folder)
    assert os.path.basename(path) == "ep1-ba6.safetensors"
    for options in ({"load_path": path}, {"autoresume": folder}):
        assert starts(**options).endswith("ep1-ba6.safetensors, saved at EPOCH_CHECKPOINT, batch 6")
    safetensors.save_file(dict(trained.params), weights)
    assert starts(load_path=weights).startswith("the weights in")


def on_mondays(state: pl.State) -> bool:
    return True


def halved(grads: Any, params: Any) -> Any:
    return ran()


def frozen() -> Any:
    model = mlp()
    model[2].bias.requires_grad_(False)
    return model


SAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cadences": (
        {
            "algorithms": [
                pl.Algorithm("a", {E.BATCH_END: ran}, when="10ba"),
                pl.Algorithm("b", {E.EPOCH_END: ran}, when="1ep"),
                pl.Algorithm("c", {E.BATCH_END: ran}, when=on_mondays),
                pl.Algorithm("d", {E.BATCH_END: ran}, when=lambda state: True),
            ],
            "evaluators": {"val": pl.Evaluator(DATA, interval="0.5dur", batches=2)},
        },
        (
            *("a (every 10 batches)", "b (every epoch)", "c (when on_mondays(state))", "when the lambda in line"),
            "val: every 50% of the duration, 2 batches",
        ),
    ),
    "settings": (
        {"microbatch_size": 2, "precision": "amp_bf16", "clip_grad": 1.0, "seed": 7, "max_duration": "90m"},
        (
            *(
                "Sequential, 67 parameters in 4 tensors (3 of them frozen), on cpu",
                "list, 6 batches an epoch",
                "seed 7",
            ),
            *("1:30:00 of wall-clock time", "sgd(lr=0.1", "amp_bf16", "of at most 2 samples", "clipped to a norm of 1"),
        ),
    ),
    "a callback of all events": ({"callbacks": [ran]}, ("at every event callback ran",)),
    "a clipping function": ({"clip_grad": halved}, ("clipped by halved",)),
    "memory": ({}, ("a step writes in place where references show",)),
    "memory of kept States": ({"donate": True}, ("a step takes the memory of kept States",)),
    "memory, strict": ({"strict": True}, ("each step copies: strict=True",)),
    "compiled": (
        {"compile": True, "steps_per_call": 8, "watch": {E.EPOCH_END}, "donate": True},
        ("at observed events: at EPOCH_END; 8 steps a call", "a compiled step writes in place where references show"),
    ),
    "where possible": (
        {"compile": "where possible", "callbacks": [ran], "donate": False},
        (
            "compiled where possible, into graphs that end at observed events: at all ev",
            "each step copies: donate=False",
        ),
    ),
}


def test_settings_are_in_words() -> None:
    for case, (options, says) in SAYS.items():
        shown = words(frozen(), DATA, **options)
        assert [each for each in says if each not in shown] == [], case
        assert ("compiled" in shown) is ("compile" in options)


def test_where_references_are_not_counted_that_is_said() -> None:
    why = "references are not counted here, because this interpreter does not count references"
    with without_counts():
        assert f"each step copies: {why}" in words()
        assert f"kept by themselves: {why}" in words(donate=True)
        assert f"a compiled step copies wherever the State before it was observed: {why}" in words(
            donate=True, compile=True
        )


def test_nothing_is_run_and_no_data_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    untouchable: Any = type("Untouchable", (), {"__iter__": ran})()
    drawn, net, before = iter(DATA), mlp(), torch.get_rng_state()
    weight = net[0].weight.detach().clone()
    options = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep"}
    algorithms = [pl.Algorithm("no", dict.fromkeys(E, ran), init=ran)]
    explain(net, untouchable, algorithms=algorithms, callbacks=[Watcher()], evaluators=drawn, **options)
    explain(net, drawn, loggers=[pl.loggers.InMemoryLogger()], **options)
    assert "BATCH_END" in capsys.readouterr().out
    assert len(list(drawn)) == 6
    assert torch.equal(net[0].weight, weight)
    assert torch.equal(before, torch.get_rng_state())


def test_it_reads_at_100_columns_and_is_plain() -> None:
    algorithms = [pl.Algorithm(f"algorithm_{i}", dict.fromkeys(E, ran), when="10ba") for i in range(3)]
    optimizer = pl.optim.adamw(lr=pl.schedules.cosine("3ep", peak=3e-4, warmup="5ba"))
    shown = shown_of(algorithms=algorithms, optimizer=optimizer, evaluators=DATA, iteration_length="1ep")
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.isascii()
    assert "\x1b" not in shown
