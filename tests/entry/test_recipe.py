"""Recipes: what surrounds a State, as a value."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop._internal.equality import equal
from pure_loop.entry.arguments import DEFAULTS
from tests.support.problem import cross_entropy, mlp, noisy, points
from tests.support.refused import Refusal, check, rows
from tests.support.streams import assert_same_stream
from tests.support.tiers import examples

A, C = pl.algorithms, pl.callbacks
DATA, VAL = points(), points(1, seed=7)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) * 2


def clip(grads: Any, params: Any) -> Any:
    return grads


# Of each setting two values that differ, each by a function that makes it anew.
VALUES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "train_dataloader": (points, lambda: points(2)),
    "loss": (lambda: cross_entropy, lambda: pl.Task(loss=cross_entropy, weight=lambda batch: 1.0)),
    "optimizer": (lambda: pl.optim.sgd(lr=0.1), lambda: pl.optim.adamw(lr=pl.schedules.linear(0.1, 0.0, "2ep"))),
    "max_duration": (lambda: "2ep", lambda: "5ba"),
    "evaluators": (lambda: {"val": points(1, seed=7)}, lambda: pl.Evaluator(points(1), interval="2ba")),
    "eval_interval": (lambda: "1ep", lambda: "2ba"),
    "train_metrics": (lambda: None, lambda: [pl.metrics.accuracy()]),
    "microbatch_size": (lambda: None, lambda: 2),
    "batches_per_step": (lambda: 1, lambda: 2),
    "precision": (lambda: "fp32", lambda: "amp_bf16"),
    "clip_grad": (lambda: 1.0, lambda: clip),
    "nonfinite": (lambda: "error", lambda: "skip"),
    "algorithms": (lambda: [A.ema(half_life="2ba"), A.label_smoothing(0.1)], lambda: [A.ema(half_life="3ba")]),
    "callbacks": (lambda: [C.SpeedMonitor()], lambda: [C.SpeedMonitor(window=3)]),
    "loggers": (lambda: (), lambda: [pl.loggers.InMemoryLogger()]),
    "run_name": (lambda: None, lambda: "first"),
    "autoresume": (lambda: None, lambda: "runs"),
    "load_path": (lambda: None, lambda: "a.safetensors"),
    "seed": (lambda: 0, lambda: 3),
    "deterministic": (lambda: False, lambda: True),
    "strict": (lambda: None, lambda: True),
    "verify": (lambda: None, lambda: "2ba"),
    "device": (lambda: None, lambda: "cpu"),
    "parallel": (lambda: None, lambda: "replicate"),
    "compile": (lambda: False, lambda: "where possible"),
    "steps_per_call": (lambda: 1, lambda: 2),
    "watch": (lambda: None, lambda: {pl.Event.BATCH_END}),
    "donate": (lambda: "auto", lambda: False),
    "batches_per_epoch": (lambda: None, lambda: 2),
    "iteration_length": (lambda: None, lambda: "1ep"),
    "order": (lambda: "current", lambda: "2021"),
    "clock": (lambda: time.monotonic, lambda: time.perf_counter),
}
# Those that a run of a few batches can have, whatever the others are.
FREE = ("clip_grad", "precision", "microbatch_size", "batches_per_step", "algorithms", "seed", "evaluators", "watch")


def settings_of(second: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {name: pair[name in second]() for name, pair in VALUES.items()}


def recipe(**changes: Any) -> pl.Recipe:
    settings = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep", "clock": zero}
    return pl.Recipe(DATA, **settings | changes)


def zero() -> float:
    return 0.0


def test_each_setting_has_two_values_here() -> None:
    assert VALUES.keys() == {"train_dataloader", *DEFAULTS} == recipe().settings.keys()


@examples(15, 100)
@given(second=st.frozensets(st.sampled_from(FREE)))
def test_a_recipe_trains_as_the_call_of_fit_with_its_settings(second: frozenset[str]) -> None:
    settings = {name: VALUES[name][name in second]() for name in ("loss", "optimizer", "max_duration", *FREE)}
    with_clock: dict[str, Any] = settings | {"clock": zero}
    runs = [pl.Recipe(DATA, **with_clock).fit(noisy()), pl.fit(noisy(), DATA, **with_clock)]
    runs.append(pl.Recipe(seed=5).fit(noisy(), train_dataloader=DATA, **with_clock))
    first, *others = (list(stream) for stream in runs)
    for pairs in others:
        assert_same_stream(pairs, first, "recipe and call")


@examples(40, 400)
@given(second=st.frozensets(st.sampled_from(sorted(VALUES))), other=st.frozensets(st.sampled_from(sorted(VALUES))))
def test_recipes_differ_in_the_settings_that_differ(second: frozenset[str], other: frozenset[str]) -> None:
    """Whether their values were built in one call or in two; ``replace`` changes those that it is given."""
    a, b = pl.Recipe(**settings_of(second)), pl.Recipe(**settings_of(other))
    different = second ^ other
    assert pl.diff(a, b).values.keys() == different
    assert (a == b) is not different
    assert bool(pl.diff(a, b)) is bool(different)
    assert a.replace(**{name: VALUES[name][name in other]() for name in different}) == b
    lines = str(pl.diff(a, b)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [name for name in a.settings if name in different]
    changed = {name for name in DEFAULTS if not equal(a.settings[name], DEFAULTS[name])}
    assert {name for name in VALUES if f"\n    {name}=" in str(a)} == changed


def test_what_is_printed_is_not_default_and_has_no_address() -> None:
    assert repr(pl.Recipe()) == "Recipe()"
    assert repr(pl.Recipe(DATA, seed=3)) == "Recipe(list of 3, seed=3)"
    text = str(
        recipe(evaluators={"val": DataLoader(TensorDataset(torch.ones(4)))}, algorithms=[A.ema(half_life="2ba")])
    )
    assert "    evaluators={'val': DataLoader of 4},\n    algorithms=[ema(half_life='2ba')],\n" in text
    assert "    optimizer=sgd(lr=0.1),\n    max_duration='2ep',\n" in text
    secret = pl.loggers.SlackLogger("#a", token="xoxb-1")
    assert "xoxb" not in str(recipe(loggers=[secret])) + str(pl.diff(recipe(loggers=[secret]), recipe()))


def test_a_recipe_does_not_change() -> None:
    algorithms, evaluators = [A.ema(half_life="2ba")], {"val": VAL}
    made = recipe(algorithms=algorithms, evaluators=evaluators)
    watch = {pl.Event.BATCH_END}
    watching = made.replace(watch=watch)
    watch.add(pl.Event.FIT_END)
    assert watching.watch == {pl.Event.BATCH_END}
    algorithms.append(A.label_smoothing(0.1))
    evaluators["test"] = VAL
    assert (len(made.algorithms), list(made.evaluators)) == (1, ["val"])
    with pytest.raises(AttributeError):
        made.seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)
    assert pickle.loads(pickle.dumps(recipe(loss=loss))) == recipe(loss=loss)


def test_each_tool_gives_what_its_function_gives(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"evaluators": {"val": VAL}, "algorithms": [A.label_smoothing(0.1)]}
    made, net = recipe(**settings), mlp()
    settings = {name: value for name, value in made.settings.items() if value is not None}
    state = made.run(net)
    assert state.timestamp.batch == 6
    assert pl.run(made.evaluate(state)).metrics == pl.run(pl.evaluate(state, {"val": VAL}, loss=cross_entropy)).metrics
    own = pl.run(made.evaluate(state, {"own": DATA}, loss=loss)).metrics["own"]
    assert own == pl.run(pl.evaluate(state, {"own": DATA}, loss=loss)).metrics["own"]
    both = [list(made.predict(state, VAL)), list(pl.predict(state, VAL))]
    assert_same_stream(*both, "predict")
    printed = [io.StringIO(), io.StringIO()]
    made.explain(net, file=printed[0], full=True)
    pl.explain(net, file=printed[1], full=True, **settings)
    assert printed[0].getvalue() == printed[1].getvalue()
    assert made.rehearse(net, call_callbacks=False).phases == pl.rehearse(net, call_callbacks=False, **settings).phases
    assert made.lr_find(net, steps=10).losses == pl.lr_find(net, steps=10, **settings).losses
    assert made.largest_microbatch(net, max_duration=None) == 4
    whole = {"steps": "2ba", "metric": "val/loss"}
    assert made.ablate(net, **whole) == pl.ablate(net, **whole, **settings)
    inside = next(state for event, state in made.fit(net) if event is pl.Event.BATCH_START)
    assert made.inspect(inside).samples == pl.inspect(inside, loss=cross_entropy).samples
    logger = pl.loggers.InMemoryLogger()
    logged = made.replace(loggers=[pl.loggers.ConsoleLogger(stream=io.StringIO()), logger])
    logged.run(net)
    reports = [logged.report(path=tmp_path / "a.html"), pl.report(logger, tmp_path / "b.html")]
    assert len({path.read_text() for path in reports}) == 1
    recorder = C.FlightRecorder(tmp_path / "flight", keep="2ba")
    recorded = made.replace(callbacks=[recorder], autoresume=tmp_path / "runs")
    recorded.run(mlp())
    assert recorded.report() == tmp_path / "runs" / "report.html"
    event, again = next(recorded.rewind(mlp(), tmp_path / "flight", "3ba", "batch_end"))
    wanted = next(s for e, s in made.fit(mlp()) if e is event and s.timestamp.batch == 3)
    assert_same_stream([(event, again)], [(event, wanted)], "rewind")


NET, INSIDE = mlp(), pl.State.create(mlp()).replace(batch=DATA[0])
OBSERVERS = ("callbacks", "loggers", "run_name")
# Of each tool its function, what is passed by place to the method and to the function, its own arguments, and the
# settings of the recipe that are left out.
TOOLS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "fit": ("recipe.fit", (NET,), (NET,), {}, ()),
    "explain": ("entry.explain.explain", (NET,), (NET,), {"file": None, "sample": VAL, "depth": 3, "full": True}, ()),
    "rehearse": (
        "rehearsal.rehearse.rehearse",
        (NET,),
        (NET,),
        {"sample": VAL, "world_size": 3, "fake": True, "call_callbacks": False},
        (),
    ),
    "lr_find": ("tools.lr_find.lr_find", (NET,), (NET,), {"lowest": 1e-3, "highest": 2.0, "steps": 11}, ()),
    "largest_microbatch": ("entry.largest_microbatch.largest_microbatch", (NET,), (NET,), {}, ()),
    "ablate": ("tools.ablate.ablate", (NET,), (NET,), {"steps": "2ba", "metric": "train/loss"}, ()),
    "rewind": (
        "tools.rewind.rewind",
        (NET, "flight", "1ba", "batch_end"),
        ("flight", "1ba", "batch_end", NET),
        {"occurrence": 2},
        (*OBSERVERS, "autoresume", "load_path"),
    ),
    "inspect": ("tools.inspection.inspect", (INSIDE, VAL), (INSIDE, VAL), {"gradients": False}, ("train_dataloader",)),
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("changed", [{}, {"seed": 9, "callbacks": (C.TimeLeft(),), "train_dataloader": VAL}], ids=str)
def test_what_a_method_is_given_arrives(name: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting of the recipe, each change, and each argument of the tool, none at its default."""
    place, of_method, of_function, own, left_out = TOOLS[name]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(f"pure_loop.{place}", lambda *args, **kwargs: calls.append((args, kwargs)))
    made = pl.Recipe(**settings_of(frozenset(VALUES)))
    getattr(made, name)(*of_method, **own, **changed)
    ((args, kwargs),) = calls
    defaults = {setting: DEFAULTS.get(setting) for setting in left_out}
    expected: dict[str, Any] = {**made.settings, **defaults, **changed, **own}
    if name == "inspect":
        expected.pop("train_dataloader")
    assert args == of_function
    assert kwargs.keys() == expected.keys()
    assert [key for key in kwargs if not equal(kwargs[key], expected[key])] == []


def test_evaluation_has_of_a_recipe_what_is_not_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    for function in ("evaluate", "predict"):
        monkeypatch.setattr(f"pure_loop.entry.evaluate.{function}", lambda *args, **kwargs: calls.append(kwargs))
    made = pl.Recipe(**settings_of(frozenset(VALUES)))
    shared = ("algorithms", "precision", "seed", "device", "parallel", "strict", "deterministic")
    of_recipe = {name: made.settings[name] for name in shared}
    made.evaluate(NET), made.predict(NET, VAL)
    made.evaluate(NET, VAL, loss=loss, seed=9, loggers=()), made.predict(NET, VAL, task=None, gradients=True, watch=())
    assert calls == [
        {**of_recipe, "loss": made.loss},
        {**of_recipe, "task": made.loss, "gradients": False},
        {**of_recipe, "loss": loss, "seed": 9, "loggers": ()},
        {**of_recipe, "task": made.loss, "gradients": True, "watch": ()},
    ]


def test_a_profile_leaves_the_files_and_loggers_of_the_run_alone(tmp_path: Path) -> None:
    logger = pl.loggers.InMemoryLogger()
    made = recipe(autoresume=tmp_path / "runs", loggers=[logger])
    assert made.profile(mlp(), batches=2, warmup=1).batches == 2
    assert not (tmp_path / "runs").exists()
    assert not logger.metrics


def test_no_run_holds_the_state_that_it_begins_with() -> None:
    """As in ``pl.run(pl.fit(state))``: the parameters of one State less."""
    alive: list[bool] = []

    def start() -> pl.State:
        state = recipe(max_duration="1ep").run(mlp())
        first.append(ref(state.params["0.weight"]))
        return state

    first: list[ref[Tensor]] = []
    watching = recipe(strict=False, callbacks=[lambda event, state: alive.append(first[-1]() is not None)])
    watching.run(start())
    assert not any(alive[-6:])


def test_a_stream_that_has_begun_holds_no_callback() -> None:
    callback = C.SpeedMonitor()
    stream, held = recipe(callbacks=[callback]).fit(mlp()), ref(callback)
    del callback
    pl.run(stream)
    gc.collect()
    assert held() is None


def test_runs_that_part_have_the_settings_that_differ() -> None:
    made = recipe(algorithms=[A.gradient_clipping("norm", 0.5)])
    other = made.replace(algorithms=[A.gradient_clipping("norm", 0.1)], nonfinite="skip")
    where = pl.diff(made.fit(mlp()), other.fit(mlp()))
    assert where
    assert where.settings.values.keys() == {"algorithms", "nonfinite"}
    assert "\n  nonfinite: 'error' and 'skip'" in str(where)
    assert "\n  nonfinite: " in str(pl.diff(made.fit(mlp()), made.fit(mlp(), nonfinite="skip")))
    assert "\n" not in str(pl.diff(made.fit(mlp()), made.fit(mlp())))


def test_loggers_record_the_recipe() -> None:
    logger = pl.loggers.InMemoryLogger()
    made = recipe(loggers=[logger], clip_grad=0.5)
    made.run(mlp())
    assert made.settings.keys() - {"seed"} <= logger.hyperparameters.keys()
    assert (logger.hyperparameters["clip_grad"], logger.hyperparameters["seed"]) == (0.5, 0)


def drawn() -> Iterator[Any]:
    batches = (batch for batch in points(9))
    next(batches)
    return batches


def twice(data: Any, *changes: Any) -> pl.Stream:
    made = recipe(max_duration="1ba").replace(train_dataloader=data)
    made.run(mlp())
    return made.replace(seed=1).fit(mlp())


TYPE, VALUE = pl.errors.ArgumentTypeError, pl.errors.ArgumentError
GONE = ("an iterator that was drawn from before", "recipe.fit(..., train_dataloader=another)")
REFUSED = [
    Refusal(name, call, error, says)
    for name, call, error, says in (
        (
            "no data",
            lambda: pl.Recipe(seed=1).fit(mlp()),
            TYPE,
            ("no train_dataloader and no optimizer and no max_", "fit(..., train_dataloader=train_dataloader, "),
        ),
        ("data by place", lambda: recipe().fit(mlp(), DATA), TYPE, ("others, train_dataloader=train_dataloader, ",)),  # type: ignore[call-arg]
        (
            "no data to run",
            lambda: pl.Recipe().run(mlp()),
            TYPE,
            ("recipe.run(..., train_dataloader=train_dataloader, ",),
        ),
        ("nor to profile", lambda: pl.Recipe(seed=1).profile(mlp()), TYPE, ("recipe.profile(..., ",)),
        (
            "no optimizer",
            lambda: recipe(optimizer=None).lr_find(mlp()),
            TYPE,
            ("no optimizer, which lr_find needs: write recipe.lr_find(..., optimizer=pl.optim.adamw(lr=3e-4))",),
        ),
        ("no evaluators", lambda: recipe().evaluate(mlp()), TYPE, ("no evaluators", 'evaluators={"val": ')),
        ("net= of a tool", lambda: pl.inspect(net=mlp()), TYPE, ("inspect has no argument 'net'", "needs state")),
        ("assign", lambda: setattr(recipe(), "seed", 3), AttributeError, ("recipe = recipe.replace(seed=...)",)),
        ("delete", lambda: delattr(recipe(), "seed"), AttributeError, ("a recipe is a value",)),
        ("attribute", lambda: recipe().train, AttributeError, ("has no 'train'; did you mean recipe.fit(model)?",)),
        ("near attribute", lambda: recipe().evaluator, AttributeError, ("did you mean recipe.evaluators?",)),
        ("other attribute", lambda: recipe().zzz, AttributeError, ("has no 'zzz': it has ", "lr_find")),
        ("model=", lambda: recipe(model=mlp()), TYPE, ("a recipe has no model", ".fit(model)")),
        ("steps=", lambda: recipe().profile(mlp(), steps=3), TYPE, ("write batches=3",)),
        ("min_lr=", lambda: recipe().lr_find(mlp(), min_lr=1e-3), TYPE, ("write lowest=0.001",)),
        ("loss= to predict", lambda: recipe().predict(mlp(), VAL, loss=loss), TYPE, ("write task=pl.Task(forward=",)),  # type: ignore[call-arg]
        ("resuming", lambda: pl.blame(recipe(autoresume="a").fit(mlp())), VALUE, ("blame: ", "autoresume=None")),
        ("no record", lambda: recipe().report(), TYPE, ("no logger that keeps a record, and no autoresume",)),
        ("near", lambda: recipe(optimiser=1), TYPE, ("Recipe has no argument 'optimiser'; did you mean optimizer=?",)),
        ("near in replace", lambda: recipe().replace(evaluator=1), TYPE, ("did you mean evaluators=?",)),
        ("near in a tool", lambda: recipe().lr_find(mlp(), low=1), TYPE, ("lr_find has no argument 'low'",)),
        ("near in fit", lambda: recipe().fit(mlp(), max_duraton="1ep"), TYPE, ("fit has no argument 'max_duraton'",)),
        ("task", lambda: recipe(task=pl.Task()), TYPE, ("loss=lambda outputs, batch: function(outputs, batch[1]))",)),
        ("a model", lambda: pl.Recipe(mlp()), TYPE, ("a recipe has no model", ".fit(model)")),
        (
            "model and data",
            lambda: pl.Recipe(mlp(), DATA),
            TYPE,
            ("Recipe takes 1 argument without its name", "A recipe has no model"),
        ),  # type: ignore[misc]
        ("microbatches", lambda: recipe(microbatch_size=0), VALUE, ("microbatch_size=0",)),
        ("a loss", lambda: recipe(loss="mse"), TYPE, ("loss is 'mse'",)),
        ("evaluators", lambda: recipe(evaluators=3), TYPE, ("evaluator 'eval'",)),
        ("interval", lambda: recipe().replace(eval_interval=3), ValueError, ('Write "3ep"',)),
        ("seed", lambda: recipe(seed=None), TYPE, ("seed=None",)),
        ("donate", lambda: recipe(donate=None), VALUE, ("donate=None",)),
        ("duration", lambda: recipe().replace(max_duration="2 weeks"), ValueError, ("max_duration",)),
        ("a generator", lambda: recipe().replace(train_dataloader=drawn()).fit(mlp()), VALUE, GONE),
        ("an iterator", lambda: twice(iter(points(9))), VALUE, GONE),
        ("a run", lambda: pl.Recipe(recipe().fit(mlp())), TYPE, ("is a Stream: a recipe has no model, and no run",)),
        ("rewind", lambda: recipe().rewind(mlp()), TYPE, ('recipe.rewind(model, folder, "12ba", "batch_start").',)),  # type: ignore[call-arg]
        (
            "the order of pl.rewind",
            lambda: recipe().rewind("runs", "2ba", "batch_end", mlp()),  # type: ignore[arg-type]
            TYPE,
            ("rewind: model must be a torch.nn.Module, got 'runs'", "recipe.rewind(model, folder, when, event)"),
        ),
        ("diff", lambda: pl.diff(recipe(), recipe().fit(mlp())), TYPE, ("two recipes, or two runs",)),  # type: ignore[call-overload]
    )
]


def given(call: Callable[..., Any], says: str) -> Refusal:
    """A function that is given a recipe."""
    return Refusal(says, call, TYPE, ("was given a Recipe", f"write recipe.{says}"))


REFUSED += [
    given(lambda: pl.fit(mlp(), recipe()), "fit(model)."),  # type: ignore[call-arg]
    given(lambda: pl.fit(recipe(), DATA, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"), "fit(model)."),  # type: ignore[arg-type]
    given(lambda: pl.rehearse(mlp(), recipe()), "rehearse(model)."),  # type: ignore[arg-type]
    given(lambda: pl.rehearse(recipe(), mlp()), "rehearse(model)."),  # type: ignore[arg-type]
    given(lambda: pl.evaluate(mlp(), recipe()), "evaluate(model)."),  # type: ignore[arg-type]
    given(lambda: pl.predict(mlp(), dataloader=recipe()), "predict(model, dataloader)."),  # type: ignore[arg-type]
    given(lambda: pl.ablate(mlp(), recipe(), steps="1ba"), "ablate(model, steps=...)."),  # type: ignore[arg-type]
]


@rows(REFUSED)
def test_a_mistake_is_refused_at_the_call(refusal: Refusal) -> None:
    check(refusal)


class Anew:
    """An iterator that begins anew."""

    def __iter__(self) -> Anew:
        self.batches = iter(points())
        return self

    def __next__(self) -> Any:
        return next(self.batches)


def test_data_that_begins_anew_and_calls_that_were_refused_are_no_draw() -> None:
    made = recipe().replace(train_dataloader=Anew())
    assert [made.run(mlp()).timestamp.batch for _ in range(2)] == [6, 6]
    once = recipe(max_duration="1ep").replace(train_dataloader=iter(points()))
    with pytest.raises(pl.errors.ArgumentTypeError):
        once.fit(torch.nn.Linear)  # type: ignore[arg-type]
    assert once.run(mlp()).timestamp.batch == 3
    generated = recipe(max_duration="1ep").replace(train_dataloader=(batch for batch in points()))
    generated.fit(mlp()).close()
    assert generated.run(mlp()).timestamp.batch == 3


def test_evaluators_are_not_drawn_from_before_a_run() -> None:
    assert isinstance(recipe(evaluators=itertools.cycle(VAL)).evaluators, itertools.cycle)


def test_an_iterator_serves_one_call_that_draws_and_any_that_does_not() -> None:
    made = recipe(max_duration="2ba").replace(train_dataloader=iter(points(9)))
    made.explain(mlp(), file=io.StringIO())
    assert made.run(mlp(), train_dataloader=points()).timestamp.batch == 2
    assert made.run(mlp()).timestamp.batch == 2
    made.explain(mlp(), file=io.StringIO())
    assert made.run(mlp(), train_dataloader=iter(points(2))).timestamp.batch == 2
