"""What a part of a batch weighs: parts of weight 0 count for nothing, and weights that torch's losses imply are used.

Everything is compared with a loop by hand, in float64: the loss of the whole batch by one call of torch's loss, or the
weighted mean of the losses of those parts that weigh something.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import weights as _weights
from pure_loop._internal.weights import implied_by
from pure_loop.distributed import Parallel
from pure_loop.random import seeded
from pure_loop.stages import loss as _loss
from pure_loop.testing.ranks import shared_pool
from tests.support.refused import Refusal, check, rows
from tests.support.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")

FEATURES, CLASSES = 3, 4
ONE = {Event.BATCH_END}
WATCHED = {"every event": None, "one": ONE, "two": {Event.AFTER_BACKWARD, Event.BATCH_END}}
Loss = tuple[Any, dict[str, Tensor]]
"""The loss of one batch, and its gradients."""


class Words(nn.Module):
    """Scores of shape (n, classes), or (n, classes, words) where inputs are (n, words, features)."""

    def __init__(self, last: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        with seeded(0):
            self.layer, self.last = nn.Linear(FEATURES, CLASSES).double(), last

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.last(out.transpose(1, -1) if out.ndim > 2 else out)


def batch_of(targets: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(targets), FEATURES, dtype=torch.float64, generator=generator), torch.tensor(targets)


def trained(batch: Any, module: nn.Module | None = None, **options: Any) -> Loss:
    module = Words() if module is None else module
    settings = {"optimizer": pl.optim.sgd(lr=1.0), "max_duration": "1ba", "watch": ONE, **options}
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    ends = [state for event, state in pl.fit(module, [batch], **settings) if event is Event.BATCH_END]
    return ends[0].loss, {name: before[name] - each for name, each in ends[0].params.items()}


def by_hand(loss: Callable[[nn.Module], Any], module: nn.Module | None = None) -> Loss:
    module = Words() if module is None else module
    value = loss(module)
    found = torch.autograd.grad(value, list(module.parameters()))
    return value.detach(), dict(zip(dict(module.named_parameters()), found, strict=True))


def whole(loss: Any, batch: Any, module: nn.Module | None = None) -> Loss:
    """By one call of torch's loss on the whole batch."""
    return by_hand(lambda module: loss(module(batch[0]), batch[1]), module)


def same(given: Loss, wanted: Loss) -> None:
    assert total(given[0]).dtype is wanted[0].dtype
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
    close(total(given[0]), wanted[0])
    for name, gradient in wanted[1].items():
        close(given[1][name], gradient)


def total(loss: Any) -> Tensor:
    return loss["total"] if isinstance(loss, dict) else loss  # type: ignore[no-any-return]


def evaluated(module: nn.Module, batches: Any, size: int | None = None, metrics: Any = None, **options: Any) -> Any:
    evaluator = pl.Evaluator(batches, microbatch_size=size, **({} if metrics is None else {"metrics": metrics}))
    return pl.run(pl.evaluate(module, evaluator, **options)).metrics["eval"]


@contextlib.contextmanager
def reading(weights: bool) -> Iterator[None]:
    """If not, weights that are tensors are not read, as if they were on a GPU."""
    real = _weights.read_weight

    def unread(weight: Any, what: str) -> Any:
        return weight.reshape(()) if isinstance(weight, Tensor) else real(weight, what)

    with pytest.MonkeyPatch.context() as patch:
        if not weights:
            patch.setattr(_weights, "read_weight", unread)
            patch.setattr(_weights, "is_readable", lambda tensor: False)
            patch.setattr(_loss, "read_weight", unread)
        yield


# What torch's losses imply.

Case = tuple[Any, nn.Module, tuple[Tensor, Tensor]]


@st.composite
def of_classes(draw: Any) -> Case:
    """Cross entropy and the negative log-likelihood, with all that they may be told."""
    n, words = draw(st.integers(1, 6)), draw(st.sampled_from([(), (1,), (3,)]))
    ignored, kind = draw(st.sampled_from([-100, 1])), draw(st.sampled_from(["indices", "probabilities", "likelihood"]))
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(["mean", "sum"]))}
    if draw(st.booleans()):
        weights = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.7]), min_size=CLASSES, max_size=CLASSES))
        options["weight"] = torch.tensor(weights, dtype=torch.float64)
    if kind == "probabilities":
        targets = torch.randn(n, CLASSES, *words, dtype=torch.float64).softmax(1)
    else:
        options["ignore_index"] = ignored
        size, choices = n * sum(words or (1,)), [*range(CLASSES), ignored, ignored]
        values = draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size))
        targets = torch.tensor(values).reshape(n, *words)
    # A class of weight 0 is a case of its own, below.
    if kind != "likelihood" and (kind == "probabilities" or bool(options.get("weight", torch.ones(1)).all())):
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2]))
    functions: Any = (F.cross_entropy, nn.CrossEntropyLoss)
    module = Words()
    if kind == "likelihood":
        functions, module = (F.nll_loss, nn.NLLLoss), Words(partial(F.log_softmax, dim=1))
    loss = draw(st.sampled_from([partial(functions[0], **options), functions[1](**options)]))
    return loss, module, (torch.randn(n, *words, FEATURES, dtype=torch.float64), targets)


def _signs(t: Tensor) -> Tensor:
    return t.sign() + (t == 0)


def _first_label(t: Tensor) -> Tensor:
    """One class a sample, and -1 after it, as multilabel_margin_loss has it."""
    labels = torch.full(t.shape, -1)
    labels[:, 0] = (t[:, 0] > 0).long()
    return labels


F, clone = functional, torch.clone
# The function, the module, what makes outputs fit it, and what makes targets of standard normal numbers.
ELEMENTWISE: list[tuple[Any, ...]] = [
    (F.mse_loss, nn.MSELoss, clone, clone),
    (F.l1_loss, nn.L1Loss, clone, clone),
    (F.smooth_l1_loss, nn.SmoothL1Loss, clone, clone),
    (F.huber_loss, nn.HuberLoss, clone, clone),
    (F.binary_cross_entropy, nn.BCELoss, torch.sigmoid, torch.sigmoid),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, clone, torch.sigmoid),
    (F.kl_div, nn.KLDivLoss, partial(F.log_softmax, dim=1), lambda t: t.softmax(1)),
    (F.poisson_nll_loss, nn.PoissonNLLLoss, clone, torch.exp),
    (F.soft_margin_loss, nn.SoftMarginLoss, clone, _signs),
    (F.hinge_embedding_loss, nn.HingeEmbeddingLoss, clone, _signs),
]
OF_ROWS: list[tuple[Any, ...]] = [
    (F.multi_margin_loss, nn.MultiMarginLoss, clone, lambda t: (t[:, 0] > 0).long()),
    (F.multilabel_margin_loss, nn.MultiLabelMarginLoss, clone, _first_label),
    (F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, clone, lambda t: (t > 0).to(t)),
]


@st.composite
def of_elements(draw: Any) -> Case:
    row = draw(st.sampled_from([*ELEMENTWISE, *OF_ROWS]))
    function, cls, last, make = row
    n, words = draw(st.integers(1, 6)), () if row in OF_ROWS else draw(st.sampled_from([(), (3,)]))
    reduction = draw(st.sampled_from(["mean", "sum", *(["batchmean"] if cls is nn.KLDivLoss else [])]))
    loss = draw(st.sampled_from([partial(function, reduction=reduction), cls(reduction=reduction)]))
    targets = make(torch.randn(n, CLASSES, *words, dtype=torch.float64))
    return loss, Words(last), (torch.randn(n, *words, FEATURES, dtype=torch.float64), targets)


@given(of_classes() | of_elements(), st.integers(1, 6), st.sampled_from(sorted(WATCHED)), st.booleans(), st.data())
@examples(fast=40, thorough=3000)
def test_every_split_gives_the_loss_of_torch_on_the_whole_batch(
    case: Case, size: int, watch: str, reads: bool, data: Any
) -> None:
    """In an evaluation data in batches of unequal sizes, in microbatches, is one batch."""
    loss, module, batch = case
    value = loss(module(batch[0]), batch[1]).detach()
    cut = data.draw(st.integers(0, len(batch[0]) - 1))
    batches = [tuple(each[part] for each in batch) for part in (slice(0, cut), slice(cut, None)) if part.stop != 0]
    with reading(reads):
        found = evaluated(module, batches, size, pl.metrics.loss(), loss=loss)["loss"]
        torch.testing.assert_close(found.to(value.dtype), value, rtol=1e-12, atol=1e-13, equal_nan=True)
        hypothesis.assume(not value.isnan())  # a mean over nothing
        same(trained(batch, module, loss=loss, microbatch_size=size, watch=WATCHED[watch]), whole(loss, batch, module))


ON_RANKS: list[Any] = [
    functional.cross_entropy,
    partial(functional.cross_entropy, weight=torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(reduction="sum"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_ranks_give_it_too(kind: Any) -> None:
    """Two processes. Targets are such that rank 0 has one that counts, and in a second batch none."""
    data = [batch_of([-100, 1, -100, 0, 1, -100]), batch_of([-100, -100, -100, 0, 1, 0], seed=1)]
    cases = list(itertools.product(range(len(ON_RANKS)), (None, 1), (0, 1)))

    def program(rank: int) -> list[Any]:
        found = []
        for number, size, index in cases:
            options: dict[str, Any] = {"loss": ON_RANKS[number], "parallel": Parallel(kind=kind)}
            settings = {"optimizer": pl.optim.sgd(lr=1.0), "max_duration": "1ba", "microbatch_size": size}
            pairs = list(pl.fit(Words(), [data[index]], **settings, **options))
            (loss,) = [state.loss for event, state in pairs if event is Event.AFTER_TRAIN_BATCH]
            params = dict(pairs[-1][1].module().named_parameters())
            found.append((loss, params, evaluated(Words(), [data[index]], size, **options)["loss"]))
        return found

    before = dict(Words().named_parameters())
    for found in shared_pool(2, checked=False).run(program):
        for (number, _, index), (loss, params, measured) in zip(cases, found, strict=True):
            wanted = whole(ON_RANKS[number], data[index])
            same((loss, {key: (before[key] - each).detach() for key, each in params.items()}), wanted)
            torch.testing.assert_close(measured, wanted[0], rtol=1e-12, atol=1e-13)


def test_each_loss_of_torch_is_in_the_table_or_takes_more_than_outputs_and_targets() -> None:
    """A loss that torch adds is looked at before it weighs its samples."""
    others = {"ctc_loss", "gaussian_nll_loss", "linear_cross_entropy", "cosine_embedding_loss", "margin_ranking_loss"}
    others |= {"triplet_margin_loss", "triplet_margin_with_distance_loss", "adaptive_log_softmax_with_loss"}
    names = {name for name in dir(functional) if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"}
    functions = {name: getattr(functional, name) for name in names if inspect.isfunction(getattr(functional, name))}
    assert {name for name, function in functions.items() if implied_by(function) is None} <= others
    modules = {name: getattr(nn, name) for name in nn.modules.loss.__all__ if hasattr(nn, name)}
    makes = {name: cls for name, cls in modules.items() if len(inspect.signature(cls.forward).parameters) == 3}
    # One is parametric, and the other is deprecated.
    assert not {n for n in makes.keys() - {"LinearCrossEntropyLoss", "NLLLoss2d"} if implied_by(makes[n]()) is None}


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


def test_where_it_can_not_be_known_a_part_weighs_its_samples() -> None:
    unknown: list[Any] = [lambda outputs, targets: functional.cross_entropy(outputs, targets), Focal()]
    unknown += [partial(F.mse_loss, weight=torch.ones(())), partial(F.cross_entropy, torch.zeros(1, 2))]
    unknown += [partial(F.cross_entropy, reduction="none"), F.triplet_margin_loss, partial(F.mse_loss, reduce=False)]
    assert [implied_by(loss) for loss in unknown] == [None] * len(unknown)
    found = [implied_by(partial(functional.mse_loss, **each)) for each in ({"size_average": False}, {"reduce": True})]  # type: ignore[arg-type]
    assert [each.summed for each in found if each is not None] == [True, False]
    # A weight of the user's own comes first: samples, though the loss is a mean over targets that are not ignored.
    batch = batch_of([0, -100, 1, 2])
    parts = [tuple(each[i : i + 2] for each in batch) for i in (0, 2)]
    wanted = by_hand(lambda module: sum(functional.cross_entropy(module(x), y) / 2 for x, y in parts))
    same(trained(batch, loss=BY_SAMPLES, microbatch_size=2), wanted)


BY_SAMPLES = pl.Task(loss=functional.cross_entropy, weight=lambda batch: len(batch[1]))


@pytest.mark.parametrize("reads", [True, False])
def test_smoothed_targets_of_class_weight_0_alone_are_an_error(reads: bool) -> None:
    """Their loss, by the other classes, is divided by 0; on the whole batch it counts."""
    batch = batch_of([0, 1, 1])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), label_smoothing=0.1)
    for size in (None, 2):
        same(trained(batch, loss=loss, microbatch_size=size), whole(loss, batch))
    with reading(reads), pytest.raises(pl.errors.DataError if reads else pl.errors.NonFiniteError):
        trained(batch, loss=loss, microbatch_size=1)
    batch[1][0] = -100
    same(trained(batch, loss=loss, microbatch_size=1), whole(loss, batch))


def test_probabilities_in_the_place_of_indices_are_refused_where_classes_have_weights() -> None:
    batch = batch_of([0, 3, 1, 2])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    options: dict[str, Any] = {"loss": loss, "algorithms": [pl.algorithms.label_smoothing(0.1)]}
    with pytest.raises(
        pl.errors.ArgumentError,
        match=r"CrossEntropyLoss.* has class weights.*label_smoothing=.*Task\(loss=\.\.\., weight=",
    ):
        trained(batch, microbatch_size=2, **options)
    own_weight = pl.Task(loss=loss, weight=lambda batch: len(batch[1]))
    same(trained(batch, microbatch_size=2, **options | {"loss": own_weight}), trained(batch, **options))


def test_a_task_of_tensors_compares_outputs_with_the_batch() -> None:
    """As an autoencoder does; a loss of torch's has no targets but these."""
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(4, 4).double()
    task = pl.Task(forward=lambda module, batch: module(batch), loss=functional.mse_loss)
    wanted = torch.autograd.grad(functional.mse_loss(model(batch), batch), [*model.parameters()])
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=1.0), "max_duration": "1ba"}
    for size in (None, 2):
        state = pl.run(pl.fit(model, [batch], loss=task, microbatch_size=size, **settings))
        steps = [old - state.params[name] for name, old in model.named_parameters()]
        torch.testing.assert_close(steps, [*wanted])


# Weights of zero.


def masked_mean(outputs: Tensor, batch: Any) -> Tensor:
    """0 / 0 in the loss, and NaN in its gradient, where nothing counts."""
    counted = (batch[1] != -100).unsqueeze(1)
    return ((outputs - 1).square() * counted).sum() / counted.sum()


def infinite(outputs: Tensor, batch: Any) -> Tensor:
    """Infinite where nothing counts."""
    counted = (batch[1] != -100).unsqueeze(1)
    return (outputs.square() * counted).sum() / counted.sum() + 1 / counted.sum()


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch[1])


def in_parts(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    found = masked_mean(outputs, batch)
    return {"total": found, "twice": 2 * found}


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda counted: int(counted.sum()),
    "float": lambda counted: 0.7 * int(counted.sum()),
    "integers": lambda counted: counted.sum(),
    "float32": lambda counted: counted.sum().float(),
    "of one element": lambda counted: counted.sum().double().reshape(1) * 0.3,
}


@st.composite
def partly(draw: Any, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[Any, pl.Task, int, Loss]:
    """A batch in which much is ignored, and not all; and the mean by hand over the parts that weigh something."""
    n, size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    targets = draw(st.lists(st.sampled_from([-100, -100, 0, 1]), min_size=n, max_size=n).filter(lambda t: max(t) >= 0))
    batch, kind = batch_of(targets, draw(st.integers(0, 99))), draw(st.sampled_from(kinds))
    loss = draw(st.sampled_from([masked_mean, infinite, entropy, in_parts]))
    parts = [tuple(each[i : i + size] for each in batch) for i in range(0, n, size)]
    counts = [int((part[1] != -100).sum()) for part in parts]

    def weighted(module: nn.Module) -> Tensor:
        pairs = zip(parts, counts, strict=True)
        losses = [total(loss(module(part[0]), part)) * count for part, count in pairs if count]
        return torch.stack(losses).sum() / sum(counts)

    task = pl.Task(loss=loss, weight=lambda batch: KINDS[kind](batch[1] != -100))
    return batch, task, size, by_hand(weighted)


@given(partly(), st.sampled_from(sorted(WATCHED)), st.booleans(), st.booleans())
@examples(fast=40, thorough=3000)
def test_a_part_of_weight_0_counts_for_nothing(case: Any, watch: str, reads: bool, large: bool) -> None:
    """Also where gradients are added up in place, as those of large models are; their hooks would add a NaN."""
    batch, task, size, wanted = case
    with reading(reads), pytest.MonkeyPatch.context() as patch:
        for user in ("engine", "ownership") if large else ():
            patch.setattr(f"pure_loop.stages.{user}.LARGE", 0)
        same(trained(batch, loss=task, microbatch_size=size, watch=WATCHED[watch]), wanted)
        measured = evaluated(Words(), [batch], size, pl.metrics.loss(), loss=task)["loss"]
    torch.testing.assert_close(measured, wanted[0], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@given(
    of_classes() | of_elements(),
    *(st.integers(1, 6), partly(("integers", "float32"))),
    st.sampled_from([Event.BATCH_END, Event.BEFORE_FORWARD, Event.AFTER_LOSS]),
)
@examples(fast=10, thorough=300)
@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_weighs_so_too(case: Case, size: int, other: Any, event: Event) -> None:
    """Tracing takes a second an example.

    Not of ``multilabel_margin_loss``: what torch 2.13 makes of that in a graph is another number than eagerly.
    """
    batch, task, parts, wanted = other
    same(trained(batch, loss=task, microbatch_size=parts, compile=True, watch={event, *ONE}), wanted)
    loss, module, batch = case
    hypothesis.assume("abel" not in str(loss) and not loss(module(batch[0]), batch[1]).isnan())
    wanted = whole(loss, batch, module)
    same(trained(batch, module, loss=loss, microbatch_size=size, compile=True), wanted)


@pytest.mark.usefixtures("interpreted")
def test_counts_of_targets_need_no_trace_each() -> None:
    """Between graphs weights are numbers on the host, and a graph holds a number for ever."""
    data = [batch_of([0] * i + [-100] * (4 - i)) for i in (4, 3, 2, 1, 3, 4)]
    settings = {"loss": F.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep", "microbatch_size": 2}
    with pl.compile.record() as compilations:
        pl.run(pl.fit(Words(), data, compile=True, watch={Event.BEFORE_FORWARD}, **settings))
    assert [each.segment for each in compilations].count("microbatch") <= 2


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("kind", ["int", "integers"])
def test_a_batch_of_weight_0_is_an_error_or_is_left_out(size: Any, kind: str) -> None:
    """Its loss is a mean over nothing, NaN, and is treated as one, also where the user's loss is a number."""
    nothing, something = batch_of([-100] * 4), batch_of([0, 1, 2, 3])
    task = pl.Task(loss=lambda outputs, batch: outputs.square().mean(), weight=lambda b: KINDS[kind](b[1] != -100))
    settings: dict[str, Any] = {"loss": task, "optimizer": pl.optim.adamw(lr=0.1), "microbatch_size": size}
    for watch, reads in ((None, True), (ONE, False), (WATCHED["two"], True)):
        fit = partial(pl.fit, Words(), max_duration="1ep", watch=watch, **settings)
        with reading(reads):
            with pytest.raises((pl.errors.DataError, pl.errors.NonFiniteError), match="batch 1"):
                pl.run(fit([something, nothing]))
            ends = [state for event, state in fit([nothing], nonfinite="skip") if event is Event.BATCH_END]
            assert all(each is None or not each.isnan().any() for each in ends[0].grads.values())
            skipping, without = pl.run(fit([something, nothing] * 2, nonfinite="skip")), pl.run(fit([something] * 2))
        assert int(skipping.skipped) == 2
        assert all(torch.equal(tensor, skipping.params[name]) for name, tensor in without.params.items())


def test_an_evaluation_of_nothing_is_nan_and_is_not_shown_to_metrics() -> None:
    found = evaluated(Words(), [batch_of([-100] * 2)], loss=F.cross_entropy)
    assert found["loss"].isnan()
    assert found["accuracy"].isnan()
    largest = pl.Metric(
        "largest",
        lambda: torch.tensor(-torch.inf, dtype=torch.float64),
        lambda accumulator, measured, batch: torch.maximum(accumulator, measured[0]),
        lambda accumulator: accumulator,
        of_loss=True,
    )
    data = [batch_of([-100] * 4), batch_of([0, 1, -100, -100])]
    found = evaluated(Words(), data, metrics=largest, loss=F.cross_entropy)
    torch.testing.assert_close(found["largest"], whole(F.cross_entropy, data[1])[0])


def _weighing(weight: Any, evaluates: bool) -> Any:
    data, task = [batch_of([0, 1, 2, 3])], pl.Task(loss=entropy, weight=lambda batch: weight)
    if evaluates:
        return pl.evaluate(Words(), data, loss=task)
    return pl.fit(Words(), data, loss=task, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba", microbatch_size=2)


@rows(
    [
        Refusal(says[0], partial(_weighing, value, evaluates), pl.errors.DataError, says, at_once=False)
        for value, evaluates, *says in [
            (None, False, "NoneType", "return"),
            (torch.ones(3), True, "shape (3,)"),
            ("2", False, "'2'", "type str"),
            (-1, True, "-1", "not negative"),
            (float("nan"), False, "nan", "finite"),
        ]
    ]
)
def test_a_weight_is_a_number(refusal: Refusal) -> None:
    check(refusal)


# Accuracy.


class Given(nn.Module):
    """Outputs that are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def accuracy(scores: Tensor, targets: Tensor, loss: Any, *metrics: Any) -> Tensor:
    return evaluated(Given(), [(scores, targets)], metrics=list(metrics) or None, loss=loss)["accuracy"]  # type: ignore[no-any-return]


def test_accuracy_ignores_what_the_loss_ignores() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    for loss, targets, wanted in (
        (F.cross_entropy, [0, 1, -100, -100], 1.0),
        (partial(F.cross_entropy, ignore_index=1), [0, 1, 1, 0], 1.0),
        (nn.CrossEntropyLoss(ignore_index=0), [1, 1, 0, 0], 0.5),
        (no_loss, [0, 1, -100, 1], 2 / 3),
    ):
        assert float(accuracy(scores, torch.tensor(targets), loss)) == pytest.approx(wanted)
    for index, wanted in ((1, 1.0), (None, 3 / 4)):
        metrics = pl.metrics.loss(), pl.metrics.accuracy(ignore_index=index)
        assert float(accuracy(scores, torch.tensor([0, 1, 1, 0]), no_loss, *metrics)) == pytest.approx(wanted), index
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"ignore_index.*whole number"):
        pl.metrics.accuracy(ignore_index=0.5)  # type: ignore[arg-type]


def test_accuracy_finds_the_classes_by_shapes_and_is_refused_where_two_axes_fit() -> None:
    """(n, words, classes) with as many words as classes: by axis 1 it was that of other numbers."""
    for words in (3, 4):
        scores, targets = torch.randn(5, words, 4), torch.randint(4, (5, words))
        right = {axis: (scores.argmax(axis) == targets).float().mean() for axis in ([-1] if words == 3 else [1, -1])}
        if words == 3:
            for outputs in (scores, scores.movedim(-1, 1)):
                torch.testing.assert_close(accuracy(outputs, targets, no_loss), right[-1])
    with pytest.raises(pl.errors.DataError, match=r"axis 1 or along the last one.*\(5, 4, 4\).*accuracy\(axis=-1\)"):
        accuracy(scores, targets, no_loss)
    # Torch's own loss has its classes along axis 1.
    torch.testing.assert_close(accuracy(scores, targets, F.cross_entropy), right[1])
    for axis, wanted in right.items():
        metrics = pl.metrics.loss(), pl.metrics.accuracy(axis=axis)
        torch.testing.assert_close(accuracy(scores, targets, no_loss, *metrics), wanted)
