"""Explain: that it shows what will happen, and does nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.algorithm import bind
from pure_loop.entry.explain import explain
from tests.support.problem import cross_entropy, fit, mlp, points, run, tied
from tests.support.uncounted import without_counts

E = pl.Event
DATA = points(6)
SETTINGS: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep"}


def shown_of(*args: Any, **options: Any) -> str:
    out = io.StringIO()
    assert explain(*(args or (mlp(), DATA)), file=out, **SETTINGS | options) is None
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


def named(shown: str) -> set[str]:
    return {line.split()[0] for line in shown.splitlines() if line.split()}


def test_the_events_are_those_of_a_run() -> None:
    for options in ({}, {"iteration_length": "1ep"}, {"order": "2021"}):
        for evaluators in ({}, {"evaluators": DATA}):
            shown = shown_of(full=True, **options, **evaluators)
            events = {event.name for event, _ in fit(data=DATA, strict=False, **options, **evaluators)}
            assert events == named(shown) & set(E.__members__)
    assert shown.index("EVAL_END") < shown.rindex("EPOCH_END")  # in the order of 2021


@given(bound_to=st.sets(st.sampled_from([event for event in E if not event.is_predict])), evaluated=st.booleans())
def test_without_full_events_with_nothing_bound_are_counted(bound_to: set[E], evaluated: bool) -> None:
    algorithms = [pl.Algorithm("mine", dict.fromkeys(bound_to, ran))] if bound_to else []
    options = {"algorithms": algorithms, **({"evaluators": DATA} if evaluated else {})}
    full, shown = shown_of(full=True, **options), shown_of(**options)
    events = named(full) & set(E.__members__)
    assert bound(shown) == bound(full)
    listed = {event.name for event in bound(full)}
    others = f"{len(events - listed)} events of this run" if events - listed else ""
    assert named(shown) & set(E.__members__) == listed
    assert others in shown
    # What is left of the loop stands in the order and at the depth of the whole, below headings with something in them.
    lines, of_full = ([line for line in text.splitlines() if named(line) & listed] for text in (shown, full))
    assert lines == of_full
    inside = {f"{side}_{part}" for side in ("BEFORE", "AFTER") for part in ("FORWARD", "LOSS", "BACKWARD")}
    assert ("for each microbatch (" in shown) is bool(inside & listed)


def test_resuming_says_from_where_and_has_no_init(tmp_path: Any) -> None:
    state = next(state for event, state in fit(data=DATA) if event is E.BATCH_CHECKPOINT)
    shown = shown_of(state, DATA, full=True)
    assert "BATCH_CHECKPOINT, epoch 0, batch 1" in shown
    assert "INIT" in named(shown_of(full=True)) - named(shown)

    def starts(**options: Any) -> str:
        return words(**options).partition(" starts from ")[2].partition(" data ")[0]

    folder, weights = str(tmp_path), str(tmp_path / "weights.safetensors")
    assert starts() == ""
    assert starts(autoresume=folder).startswith("nothing:")
    trained = run(data=DATA, autoresume=folder, max_duration="1ep")
    for options in ({"load_path": pl.latest_path(folder)}, {"autoresume": folder}):
        assert starts(**options).endswith("ep1-ba6.safetensors, saved at EPOCH_CHECKPOINT, batch 6")
    safetensors.save_file(dict(trained.params), weights)
    assert starts(load_path=weights).startswith("the weights in")


def on_mondays(state: pl.State) -> bool:
    return True


def halved(grads: Any, params: Any) -> Any:
    return ran()


WHEN: dict[str, Any] = {"a": "10ba", "b": "1ep", "c": on_mondays, "d": lambda state: True}
CADENCES = [pl.Algorithm(name, {E.EPOCH_END if name == "b" else E.BATCH_END: ran}, when=w) for name, w in WHEN.items()]
HALF = pl.Evaluator(DATA, interval="0.5dur", batches=2)
SAYS: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithms": CADENCES},
        "a (every 10 batches)|b (every epoch)|c (when on_mondays(state))|when the lambda in",
    ),
    ({"evaluators": {"val": HALF}}, "val: every 50% of the duration, 2 batches"),
    ({"precision": "amp_bf16", "seed": 7, "max_duration": "90m"}, "seed 7|1:30:00 of wall-clock time|amp_bf16"),
    ({"microbatch_size": 2, "clip_grad": 1.0}, "sgd(lr=0.1|of at most 2 samples|clipped to a norm of 1"),
    ({"microbatch_size": "auto"}, "the whole batch at once, halved where"),
    (
        {},
        "Tied, |of them frozen), on cpu, float32|list, 6 batches an epoch|step writes in place where references show",
    ),
    ({"callbacks": [ran], "clip_grad": halved}, "at every event callback ran|clipped by halved"),
    ({"donate": True}, "a step takes the memory of kept States"),
    ({"strict": True}, "each step copies: strict=True"),
    (
        {"compile": True, "watch": {E.EPOCH_END}, "steps_per_call": 8},
        "at observed events: at EPOCH_END; 8 steps a",
    ),
    ({"compile": True, "donate": True}, "a compiled step writes in place where references show"),
    ({"compile": "where possible", "callbacks": [ran]}, "compiled where possible, into graphs that end at|at all ev"),
    ({"compile": True, "donate": False}, "each step copies: donate=False"),
]


def test_settings_are_in_words() -> None:
    for options, says in SAYS:
        shown = words(tied(), DATA, **options)
        assert [each for each in says.split("|") if each not in shown] == [], options
        assert ("compiled" in shown) is ("compile" in options)


def test_where_references_are_not_counted_that_is_said() -> None:
    why = ": references are not counted here, because this interpreter does not count references"
    with without_counts():
        assert f"each step copies{why}" in words()
        assert f"kept by themselves{why}" in words(donate=True)
        compiled = words(donate=True, compile=True)
        assert f"a compiled step copies wherever the State before it was observed{why}" in compiled


def test_nothing_is_run_and_no_data_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    untouchable: Any = type("Untouchable", (), {"__iter__": ran})()
    drawn, net, before = iter(DATA), mlp(), torch.get_rng_state()
    weight = net[0].weight.detach().clone()
    algorithms = [pl.Algorithm("no", dict.fromkeys(E, ran), init=ran)]
    explain(net, untouchable, algorithms=algorithms, callbacks=[Watcher()], evaluators=drawn, **SETTINGS)
    explain(net, drawn, loggers=[pl.loggers.InMemoryLogger()], **SETTINGS)
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
