"""Laws on the device, with deterministic kernels: of order, of resumption, of evaluation and of microbatches.

Each is tried in a process of its own, that of order in several.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn import functional

import pure_loop as pl
from bench.gpu.results import Asked, asked, first_line
from bench.gpu.running import command, ended
from pure_loop import Event
from pure_loop.order import BOUNDARIES, EvaluatorPlan, Plan, going_on
from pure_loop.testing import PROBLEMS, Case, cases, differences, laws

PLANS = 200
ORDERS = 4
BOUNDARIES_TRIED = 20
FEWEST_PROCESSES = 3
# Of the laws of which each example is several runs.
EXAMPLES = 10
PRECISIONS = ("fp32", "amp_bf16")


def _flat(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of words one by one: that of sentences has no deterministic kernel on a GPU."""
    return functional.cross_entropy(outputs.transpose(1, 2).flatten(0, 1), targets.flatten())


DRAWN = [
    attrs.evolve(problem, loss=_flat) if problem.name == "transformer" else problem for problem in PROBLEMS.values()
]


def fit_on(device: str) -> Any:
    return functools.partial(pl.fit, device=device, deterministic=True)


def tried(
    part: Asked, law: str, strategy: SearchStrategy[Case], check: Callable[[Case], None], wanted: int, seed: int
) -> None:
    """Try a law on so many cases, of which no two have one plan; each that fails is written, and none ends it."""
    plans: set[str] = set()

    def holds(case: Case) -> None:
        plan = repr(case.plan)
        if plan in plans or len(plans) == wanted or part.left < 0:
            return
        plans.add(plan)
        try:
            check(case)
        except Exception as error:
            part.results.write(law, "failures", repr(case), value=first_line(error))
        part.results.write(law, "tried", str(seed), value=len(plans))

    part.results.write(law, "wanted", str(seed), value=wanted)
    number = seed * 1000
    while len(plans) < wanted and part.left > 0:
        settings = hypothesis.settings(
            max_examples=wanted,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(number)(settings(hypothesis.given(strategy)(holds)))()
        number += 1


def order(part: Asked, number: int) -> None:
    fit = fit_on(part.device)
    precisions = ("fp32", "fp32", "amp_bf16", "amp_fp16") if part.device == "cuda" else ("fp32", "amp_bf16")
    drawn = cases(problems=DRAWN, precisions=precisions)
    tried(part, "order", drawn, lambda case: laws.order(None, case, fit=fit), PLANS // ORDERS, number)


def evaluation(part: Asked) -> None:
    fit = fit_on(part.device)
    drawn: Any = laws.evaluation_invariance.cases(DRAWN)
    tried(part, "evaluation", drawn, lambda case: laws.evaluation_invariance(None, case, fit=fit), EXAMPLES, 0)


def microbatches(part: Asked) -> None:
    fit = fit_on(part.device)
    drawn: Any = laws.microbatch_invariance.cases([problem for problem in DRAWN if problem.separable])
    tried(part, "microbatches", drawn, lambda case: laws.microbatch_invariance(None, case, fit=fit), EXAMPLES, 0)


def resumption(part: Asked) -> None:
    """From boundaries of one run, every other one through a file, to the end of the run."""
    plan = Plan(
        batches=(6, 4, 6, 5),
        max_duration="3ep",
        microbatch_size=4,
        evaluators={"val": EvaluatorPlan(batches=(2, 3), interval="2ba")},
    )

    def algorithms() -> list[Any]:
        return [pl.algorithms.ema(half_life="2ba"), pl.algorithms.gradient_noise(), pl.algorithms.label_smoothing(0.1)]

    fit = fit_on(part.device)
    for precision in PRECISIONS:
        case = Case(plan=plan, problem="mlp", optimizer="adamw", precision=precision, clip_grad=1.0)
        whole = case.run(algorithms(), fit=fit)
        events = [event for event, _ in whole]
        boundaries = [index for index, event in enumerate(events) if event in BOUNDARIES]
        chosen = [boundaries[i * (len(boundaries) - 1) // (BOUNDARIES_TRIED - 1)] for i in range(BOUNDARIES_TRIED)]
        assert len(set(chosen)) == BOUNDARIES_TRIED
        part.results.write("resumption", "wanted", precision, value=len(chosen))
        for number, index in enumerate(chosen):
            if part.left < 0:
                break
            event, state = whole[index]
            where = f"{precision}, {event.name} of batch {state.timestamp.batch}"
            try:
                wrong = _resumed(case, algorithms, fit, whole, index, through_a_file=number % 2 == 1)
            except Exception as error:
                wrong = first_line(error)
            if wrong:
                part.results.write("resumption", "failures", where, value=wrong)
            part.results.write("resumption", "tried", precision, value=number + 1)


def _resumed(case: Case, algorithms: Any, fit: Any, whole: Any, index: int, *, through_a_file: bool) -> str | None:
    """What is different in a run that goes on from there; None: nothing."""
    start = whole[index][1]
    if through_a_file:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "state.safetensors")
            pl.save(start, path)
            start = pl.load(path, model=case.model())
    rest = case.run(algorithms(), fit=fit, start=start)
    wanted = going_on([event for event, _ in whole], index)
    if [event for event, _ in rest] != wanted:
        return "other events"
    assert wanted[0] is Event.FIT_START  # which the whole has not, at this place
    for (event, state), (_, other) in zip(rest[1:], whole[len(whole) - len(rest) + 1 :], strict=True):
        for difference in differences(state, other):
            return f"at {event.name} of batch {state.timestamp.batch}: {difference}"
    return None


def main(part: Asked) -> None:
    match part.rest:
        case ():
            _all(part)
        case ("order", number):
            order(part, int(number))
        case (law,):
            {"resumption": resumption, "evaluation": evaluation, "microbatches": microbatches}[law](part)


def _all(part: Asked) -> None:
    orders = [("order", str(number)) for number in range(ORDERS)]
    # Something is known of each, however few processors there are.
    waiting = [("resumption",), orders[0], ("evaluation",), ("microbatches",), *orders[1:]]
    given = ("--kind", part.kind, "--end", str(part.end), "--results", str(part.results.path))
    running: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
    while (waiting or running) and part.left > 0:
        while waiting and len(running) < max(os.cpu_count() or 1, FEWEST_PROCESSES):
            way = waiting.pop(0)
            running[way] = subprocess.Popen(command(part.kind, "bench.gpu.laws", *given, *way))
        for way, process in list(running.items()):
            if process.poll() is not None:
                del running[way]
                if process.returncode:
                    why = f"its process {ended(process.returncode)}"
                    part.results.write(way[0], "failures", " ".join(way), value=why)
        time.sleep(0.2)


if __name__ == "__main__":
    main(asked())
