"""Explain: that it shows what will happen, and does nothing."""

from __future__ import annotations

import io
import os

import pytest
import safetensors.torch as safetensors
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.algorithm import bind
from pure_loop.entry.explain import explain
from pure_loop.loggers import InMemoryLogger
from tests.support.uncounted import without_counts

torch.set_num_threads(1)

E = pl.Event
X = torch.zeros(6, 4, 3)
DATA = [(x, torch.zeros(4, dtype=torch.long)) for x in X]


def text(*args, **options):
    out = io.StringIO()
    options = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep", **options}
    explain(*(args or (torch.nn.Linear(3, 2), DATA)), file=out, **options)
    return out.getvalue()


def bound(shown):
    """From the printed text: what is bound at each event, in the order in which it stands there."""
    found, event = {}, None
    for line in shown.splitlines():
        name = line.split(None, 1)[0] if line.split() else ""
        if name in E.__members__:
            event = E[name]
            line = line.partition(name)[2]
        words = line.split()
        if event is not None and words[:1] in (["algorithm"], ["callback"], ["logger"]):
            found.setdefault(event, []).append((words[0], words[1]))
    return found


def same(state):
    return state


class Watcher(pl.Callback):
    def batch_end(self, state, logger):
        raise AssertionError("ran")


def test_what_is_bound_stands_at_its_event_in_the_order_in_which_it_runs():
    algorithms = [
        pl.Algorithm("a", {(E.BEFORE_LOSS, E.AFTER_LOSS, E.BATCH_END, E.AFTER_DATALOADER): same}),
        pl.Algorithm("b", {(E.BEFORE_LOSS, E.AFTER_LOSS, E.BATCH_END, E.AFTER_DATALOADER): same}),
    ]

    class Printer(pl.Logger):
        def batch_end(self, state, logger):
            raise AssertionError("ran")

    found = bound(text(algorithms=algorithms, callbacks=[Watcher()], loggers=[Printer()]))
    for event, handlers in bind(algorithms).items():
        assert [name for kind, name in found[event] if kind == "algorithm"] == [each.algorithm for each in handlers]
    assert [name for _, name in found[E.AFTER_LOSS]] == ["b", "a"]
    assert [name for _, name in found[E.AFTER_DATALOADER]] == ["a", "b"]
    assert found[E.BATCH_END] == [
        ("algorithm", "a"),
        ("algorithm", "b"),
        ("callback", "Watcher"),
        ("callback", "Recorder"),
        ("logger", "Printer"),
    ]


def test_the_events_are_those_of_a_run():
    shown = text(evaluators={"val": DATA})
    named = {line.split()[0] for line in shown.splitlines() if line.split()}
    stream = pl.fit(
        torch.nn.Linear(3, 2), DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
        evaluators={"val": DATA},
    )  # fmt: skip
    assert {event.name for event, _ in stream} == named & set(E.__members__)


def test_events_that_cant_come_are_left_out():
    shown = text()
    assert "EVAL" not in shown.replace("Evaluation", "")
    assert "ITERATION" not in shown
    assert "ITERATION_END" in text(iteration_length="1ep")
    assert "EVAL_START" in text(evaluators=DATA)


def test_going_on_says_from_where_and_has_no_init():
    stream = pl.fit(torch.nn.Linear(3, 2), DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="3ep")
    state = next(state for event, state in stream if event is E.BATCH_CHECKPOINT)
    shown = text(state, DATA)
    assert "BATCH_CHECKPOINT, epoch 0, batch 1" in shown
    assert "INIT" in text()
    assert not [line for line in shown.splitlines() if line.split()[:1] == ["INIT"]]


def test_the_older_order():
    shown = text(order="2021", evaluators=DATA)
    assert "BATCH_CHECKPOINT" not in shown
    assert shown.index("EVAL_END") < shown.rindex("EPOCH_END")


def test_cadences_are_in_words():
    def on_mondays(state):
        return True

    algorithms = [
        pl.Algorithm("a", {E.BATCH_END: same}, when="10ba"),
        pl.Algorithm("b", {E.EPOCH_END: same}, when="1ep"),
        pl.Algorithm("c", {E.BATCH_END: same}, when=on_mondays),
        pl.Algorithm("d", {E.BATCH_END: same}, when=lambda state: True),
    ]
    shown = text(algorithms=algorithms, evaluators={"val": pl.Evaluator(DATA, interval="0.5dur", batches=2)})
    for words in (
        "a  (every 10 batches)",
        "b  (every epoch)",
        "c  (when on_mondays(state))",
        "when the lambda in line",
    ):
        assert words in shown
    assert "val: every 50% of the duration, 2 batches" in shown


def test_the_settings_are_in_words():
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    shown = text(net, DATA, microbatch_size=2, precision="amp_bf16", clip_grad=1.0, seed=7, max_duration="90m")
    for words in (
        "Linear, 8 parameters in 2 tensors (2 of them frozen), on cpu",
        "list, 6 batches an epoch",
        "1:30:00 of wall-clock time",
        "sgd(lr=0.1",
        "amp_bf16",
        "of at most 2 samples",
        "clipped to a norm of 1",
    ):
        assert words in shown
    assert "seed           7" in shown


def test_callbacks_that_see_every_event_are_said_once():
    def watch(event, state):
        raise AssertionError("ran")

    shown = text(callbacks=[watch])
    assert shown.count("watch") == 1
    assert "at every event callback watch" in shown


def test_nothing_is_run_and_no_data_is_loaded(capsys):
    class Untouchable:
        def __iter__(self):
            raise AssertionError("loaded")

    def refuse(state):
        raise AssertionError("ran")

    drawn = iter(DATA)
    net, before = torch.nn.Linear(3, 2), torch.get_rng_state()
    weight = net.weight.detach().clone()
    options = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep"}
    algorithms = [pl.Algorithm("no", dict.fromkeys(E, refuse), init=refuse)]
    assert (
        explain(net, Untouchable(), algorithms=algorithms, callbacks=[Watcher()], evaluators=drawn, **options) is None
    )
    explain(net, drawn, loggers=[InMemoryLogger()], **options)
    assert "BATCH_END" in capsys.readouterr().out
    assert len(list(drawn)) == 6
    assert torch.equal(net.weight, weight)
    assert torch.equal(before, torch.get_rng_state())


def test_it_reads_at_100_columns_and_is_plain():
    algorithms = [pl.Algorithm(f"algorithm_{i}", dict.fromkeys(E, same), when="10ba") for i in range(3)]
    optimizer = pl.optim.adamw(lr=pl.schedules.cosine("3ep", peak=3e-4, warmup="5ba"))
    shown = text(algorithms=algorithms, optimizer=optimizer, evaluators=DATA, iteration_length="1ep")
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.isascii()
    assert "\x1b" not in shown


def test_what_fit_refuses_is_refused():
    with pytest.raises(pl.ArgumentError, match="precision"):
        text(precision="fp8")
    with pytest.raises(TypeError, match="colour"):
        text(colour=True)


def test_it_names_the_checkpoint_that_training_resumes_from(tmp_path):
    def starts(**options):
        shown = " ".join(text(**options).split())  # long paths are wrapped
        return shown.partition(" starts from ")[2].partition(" data ")[0]

    folder, weights = str(tmp_path), str(tmp_path / "weights.safetensors")
    assert starts() == ""
    assert starts(autoresume=folder).startswith("nothing:")
    model = torch.nn.Linear(3, 2)
    options = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    state = pl.run(pl.fit(model, DATA, autoresume=folder, **options))
    path = pl.latest(folder)
    assert os.path.basename(path) == "ep1-ba6.safetensors"
    assert starts(load_path=path).endswith("ep1-ba6.safetensors, saved at EPOCH_CHECKPOINT, batch 6")
    assert starts(autoresume=folder).endswith("ep1-ba6.safetensors, saved at EPOCH_CHECKPOINT, batch 6")
    safetensors.save_file(dict(state.params), weights)
    assert starts(load_path=weights).startswith("the weights in")


def test_what_is_compiled_and_what_is_overwritten_is_said():
    plain = text()
    assert "compiled" not in plain
    assert "a step writes in place where references show" in " ".join(plain.split())
    shown = text(compile=True, steps_per_call=8, watch={E.EPOCH_END}, donate=True)
    assert "compiled" in shown
    assert "at observed events: at EPOCH_END; 8 steps a call" in " ".join(shown.split())
    assert "a compiled step writes in place where references show" in " ".join(shown.split())
    assert "a step takes the memory of kept States" in text(donate=True)
    shown = " ".join(text(compile="where possible", callbacks=[lambda event, state: None], donate=False).split())
    assert "compiled where possible, into graphs that end at observed events: at all events" in shown
    assert "each step copies: donate=False" in shown
    assert "each step copies: strict=True" in " ".join(text(strict=True).split())


def test_where_references_are_not_counted_that_is_said():
    why = "references are not counted here, because this interpreter does not count references"
    with without_counts():
        assert f"each step copies: {why}" in " ".join(text().split())
        assert f"kept by themselves: {why}" in " ".join(text(donate=True).split())
        compiled = " ".join(text(donate=True, compile=True).split())
    assert f"a compiled step copies wherever the State before it was observed: {why}" in compiled


def test_a_clipping_function_is_named() -> None:
    def halved(grads, params):
        return {name: grad / 2 for name, grad in grads.items()}

    assert "clipped by halved" in text(clip_grad=halved)
