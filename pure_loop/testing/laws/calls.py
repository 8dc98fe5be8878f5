"""Laws about single calls: what an algorithm's functions do with a State, and to what is around them."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from pure_loop._pytree import NAMESPACE
from pure_loop.order import BOUNDARIES
from pure_loop.state import NOT_READY, State
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing._tap import Call, tapped
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import Difference, Keeper, Snapshot, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import as_far_as_it_goes
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, moment, written_to

__all__ = ["memory", "purity", "structure"]


@law("an algorithm is a function of the State alone, and changes nothing but what it returns")
def purity(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Calls each function twice, on fresh instances and with other global random states, and looks around."""
    keeper = Keeper()
    module = case.model()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def tap(call: Call) -> Any:
        snapshot = Snapshot(call.state)
        keeper.keep(call.state)
        results = []
        for seed in (11, 12):
            with reseeded(seed):
                around = Surroundings()
                try:
                    results.append(call.of(subject.make()))
                except LawViolation:
                    raise
                except Exception:  # whatever the function on trial raises; the call below raises it in the run itself
                    break  # if that one doesn't raise as well, it remembers something: the law of memory says so
                _left_alone(call, around)
            _not_written(call, snapshot)
        if len(results) == 2:
            _equal(call, *results)
        around = Surroundings()
        result = call()
        _left_alone(call, around)
        _not_written(call, snapshot)
        if isinstance(result, State):
            keeper.keep(result)
        return result

    as_far_as_it_goes(subject, case, fit, start=module, algorithms=tapped(subject, subject.make(), tap))
    changed = keeper.changed()
    if changed is not None:
        state, difference = changed
        raise written_to(
            f"a State that {subject.name} had at {moment(state)}, was written to later: something kept one of its "
            "tensors and wrote to it in place.",
            state.event,
            difference,
        )
    for name, tensor in module.named_parameters():
        if tensor.grad is not None:
            raise LawViolation(f"the user's module has a gradient after the run, in {name}.grad.")
    for name, tensor in module.state_dict().items():
        for _ in differences(tensor, before[name]):
            raise LawViolation(f"the user's module was written to: {name} is not what it was.")


def _not_written(call: Call, snapshot: Snapshot) -> None:
    changed = snapshot.changed()
    if changed is None:
        return
    if changed.leaf.endswith(".grad"):
        raise written_to(
            f"{call.who} left a gradient in a tensor of the State that it was given at {call.where}.",
            call.event,
            changed,
            "loss.backward() writes to .grad. torch.autograd.grad(loss, tensors) writes to nothing, and "
            "stages.gradients(state) is the loop's own gradient.",
        )
    raise written_to(
        f"{call.who} changed a leaf of the State that it was given, in place, at {call.where}.", call.event, changed
    )


def _left_alone(call: Call, around: Surroundings) -> None:
    changed = around.changed()
    if changed is None:
        return
    advice = ""
    if "generator" in changed:
        advice = "Draw from a generator of your own: pl.random.generator(state.seed, 'name', state.timestamp.batch)."
    raise LawViolation(f"{call.who} changed {changed} at {call.where}.", event=call.event, advice=advice)


def _equal(call: Call, one: Any, other: Any) -> None:
    if type(one) is not type(other):
        raise LawViolation(
            f"{call.who} gave {one!r} at {call.where}, and {other!r} when it was called again with the same State.",
            event=call.event,
        )
    name = "state" if isinstance(one, State) else "result"
    for difference in differences(_readable(one), _readable(other), name=name):
        raise LawViolation(
            f"{call.who} gave two results for one State at {call.where}. The global random generators were in another "
            "state, and time went by; neither may matter.",
            event=call.event,
            difference=difference,
            labels=("at first", "again"),
            advice="Draw from pl.random.generator(state.seed, 'name', state.timestamp.batch), and take the time from "
            "state.timestamp.",
        )


def _readable(result: Any) -> Any:
    """A State whose gradients can be compared: inside a call there stands something else where there are none."""
    if isinstance(result, State) and result._grads is NOT_READY:
        return result.replace(grads=None)
    return result


@law(
    "what an algorithm remembers is in the State: a fresh instance goes on where another one stopped",
    rests_on=("purity",),
)
def memory(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """At every call, an instance that saw all that came before gives what a fresh one gives."""

    def tap(call: Call) -> Any:
        result = call()
        try:
            fresh = call.of(subject.make())
        except LawViolation:
            raise
        except Exception as error:
            raise LawViolation(
                f"a fresh instance of {call.who} raised {type(error).__name__}: {error} at {call.where}, and this one, "
                "which had been called before, did not: it remembers something in itself.",
                event=call.event,
                advice=_KEEP.format(name=call.algorithm),
            ) from error
        if call.kind == "init":
            return result
        if type(result) is type(fresh):
            different = differences(_readable(result), _readable(fresh), name="state")
        else:
            different = [Difference("what it returned", result, fresh)]
        for difference in different:
            raise LawViolation(
                f"{call.who}, which had been called before, gave something else at {call.where} than a fresh instance: "
                "it remembers something in itself.",
                event=call.event,
                difference=difference,
                labels=("this one", "fresh one"),
                advice=_KEEP.format(name=call.algorithm),
            )
        return result

    as_far_as_it_goes(subject, case, fit, algorithms=tapped(subject, subject.make(), tap))


_KEEP = (
    "Keep it in the State, where going on finds it: init=lambda state: 0, state.algorithm_state['{name}'], "
    "state.remember('{name}', memory)."
)

_OF_TENSORS = ("params", "buffers", "grads")


@law("trees, shapes, dtypes and devices stay as they are, those of an algorithm's memory too")
def structure(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Looks at what each handler returns, and at its memory from its first to its last."""

    def tap(call: Call) -> Any:
        result = call()
        if call.kind != "handler":
            return result
        if not isinstance(result, State):
            raise LawViolation(
                f"{call.who} returned {result!r} at {call.where}, not a State.",
                event=call.event,
                advice="End it with `return state.replace(...)`, or `return state` where nothing changes.",
            )
        if result.model is call.state.model:
            for field in (*_OF_TENSORS, "opt_state"):
                name = "_grads" if field == "grads" else field
                before, after = getattr(call.state, name), getattr(result, name)
                if after is not before and before is not None and after is not None and before is not NOT_READY:
                    what = f"{call.who} changed the kind of a leaf"
                    _same_kind(what, call.state, before, after, f"state.{field}", nones=field == "grads")
        return result

    pairs = as_far_as_it_goes(subject, case, fit, algorithms=tapped(subject, subject.make(), tap))
    first: dict[str, Any] = {}
    # Within a batch a memory may hold what is to be put back at the end of a pair; a State that is kept has none of it.
    for event, state in pairs:
        if event in BOUNDARIES:
            for name in subject.names:
                if name in state.algorithm_state:
                    mine = state.algorithm_state[name]
                    _refuse_graph(name, state, mine)
                    _same_kind(
                        f"the memory of algorithm {name!r} became another",
                        state,
                        first.setdefault(name, mine),
                        mine,
                        f"state.algorithm_state[{name!r}]",
                    )


def _refuse_graph(name: str, state: State, memory: Any) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(memory, namespace=NAMESPACE)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            where = f"state.algorithm_state[{name!r}]" + "".join(f"[{key!r}]" for key in path)
            raise LawViolation(
                f"the memory of algorithm {name!r} holds the graph of a forward at {moment(state)}, in {where}; it "
                "keeps that batch alive, and grows with every one.",
                event=state.event,
                advice="Remember numbers: state.loss.detach().",
            )


def _same_kind(what: str, state: State, before: Any, after: Any, name: str, *, nones: bool = False) -> None:
    if before is after:
        return
    one, other = _described(before), _described(after)
    for path in dict.fromkeys([*one, *other]):
        a, b = one.get(path, "nothing"), other.get(path, "nothing")
        if a == b or (nones and "None" in (a, b)):
            continue
        where = name + "".join(f"[{key!r}]" for key in path)
        raise LawViolation(
            f"{what} at {moment(state)}: {where} was {a}, and is {b}.",
            event=state.event,
            advice="Names, shapes, dtypes and devices stay as they are, so that a State fits whatever goes on from it. "
            "Memory that grows can have its full size from the start, and a count of what is used.",
        )


def _described(tree: Any) -> dict[tuple[Any, ...], str]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE, none_is_leaf=True)
    return dict(zip(paths, map(_kind, leaves), strict=True))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return "None" if leaf is None else type(leaf).__name__
