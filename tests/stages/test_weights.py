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
from pure_loop.stages import loss as _loss
from pure_loop.testing.ranks import shared_pool
from tests.support.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")

FEATURES, CLASSES = 3, 4
WATCHED = {"every event": None, "one": {Event.BATCH_END}, "two": {Event.AFTER_BACKWARD, Event.BATCH_END}}


class Words(nn.Module):
    """Scores of shape (n, classes), or (n, classes, words) where inputs are (n, words, features)."""

    def __init__(self, outputs: int = CLASSES, last: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, outputs)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.last(out.transpose(1, -1) if out.ndim > 2 else out)


def model(outputs: int = CLASSES, last: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    torch.manual_seed(0)
    return Words(outputs, last).double()


def trained(module: nn.Module, batch: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, and its gradients."""
    settings = {"optimizer": pl.optim.sgd(lr=1.0), "max_duration": "1ba", "watch": {Event.BATCH_END}}
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    stream = pl.fit(module, [batch], **{**settings, **options})
    loss, after = next((state.loss, dict(state.params)) for event, state in stream if event is Event.BATCH_END)
    return loss, {name: before[name] - after[name] for name in before}


def by_hand(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    value = loss(module)
    found = torch.autograd.grad(value, list(module.parameters()))
    return value.detach(), dict(zip(dict(module.named_parameters()), found, strict=True))


def same(given: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    (loss, grads), (right, gradients) = given, wanted
    assert loss.dtype is right.dtype
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-11, atol=1e-13)


@contextlib.contextmanager
def weights_stay_on_their_device() -> Iterator[None]:
    """Weights that are tensors are not read, as if they were on a GPU."""
    real = _weights.read_weight

    def unread(weight: Any, what: str) -> Any:
        return weight.reshape(()) if isinstance(weight, Tensor) else real(weight, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_weights, "read_weight", unread)
        patch.setattr(_weights, "is_readable", lambda tensor: False)
        patch.setattr(_loss, "read_weight", unread)
        yield


# What torch's losses imply.


def indices(draw: Any, shape: tuple[int, ...], ignored: int | None) -> Tensor:
    size = int(torch.Size(shape).numel())
    choices = [*range(CLASSES), *([] if ignored is None else [ignored] * 2)]
    values = draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size))
    return torch.tensor(values).reshape(shape)


@st.composite
def of_classes(draw: Any) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """Cross entropy and the negative log-likelihood, with all that they may be told."""
    n, words = draw(st.integers(1, 6)), draw(st.sampled_from([None, 1, 3]))
    inputs = torch.randn((n, FEATURES) if words is None else (n, words, FEATURES), dtype=torch.float64)
    ignored = draw(st.sampled_from([None, -100, 1]))
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(["mean", "sum"]))}
    if ignored == 1:
        options["ignore_index"] = 1
    if draw(st.booleans()):
        weights = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.7]), min_size=CLASSES, max_size=CLASSES))
        options["weight"] = torch.tensor(weights, dtype=torch.float64)
    kind = draw(st.sampled_from(["indices", "probabilities", "likelihood"]))
    shape = (n,) if words is None else (n, words)
    if kind == "probabilities":
        options.pop("ignore_index", None)
        targets = torch.randn(shape[0], CLASSES, *shape[1:], dtype=torch.float64).softmax(1)
    else:
        targets = indices(draw, shape, ignored)
    if kind != "likelihood":
        # A class of weight 0 is a case of its own, below.
        smoothed = "weight" not in options or kind == "probabilities" or bool(options["weight"].all())
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2])) if smoothed else 0.0
        function, cls, last = functional.cross_entropy, nn.CrossEntropyLoss, torch.clone
    else:
        function, cls, last = functional.nll_loss, nn.NLLLoss, partial(functional.log_softmax, dim=1)
    loss = draw(st.sampled_from([partial(function, **options), cls(**options)]))
    return loss, model(last=last), inputs, targets


def elementwise(name: str) -> tuple[Callable[..., Any], type[nn.Module], Callable[[Tensor], Tensor], Any]:
    """The function, the module, what makes outputs fit it, and what makes targets of standard normal numbers."""
    signs = lambda t: t.sign() + (t == 0)  # noqa: E731
    return {
        "mse": (functional.mse_loss, nn.MSELoss, torch.clone, torch.clone),
        "l1": (functional.l1_loss, nn.L1Loss, torch.clone, torch.clone),
        "smooth_l1": (functional.smooth_l1_loss, nn.SmoothL1Loss, torch.clone, torch.clone),
        "huber": (functional.huber_loss, nn.HuberLoss, torch.clone, torch.clone),
        "bce": (functional.binary_cross_entropy, nn.BCELoss, torch.sigmoid, torch.sigmoid),
        "logits": (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, torch.clone, torch.sigmoid),
        "kl": (functional.kl_div, nn.KLDivLoss, partial(functional.log_softmax, dim=1), lambda t: t.softmax(1)),
        "poisson": (functional.poisson_nll_loss, nn.PoissonNLLLoss, torch.clone, torch.exp),
        "soft_margin": (functional.soft_margin_loss, nn.SoftMarginLoss, torch.clone, signs),
        "hinge": (functional.hinge_embedding_loss, nn.HingeEmbeddingLoss, torch.clone, signs),
        "multi": (functional.multi_margin_loss, nn.MultiMarginLoss, torch.clone, lambda t: (t[:, 0] > 0).long()),
        "labels": (functional.multilabel_margin_loss, nn.MultiLabelMarginLoss, torch.clone, _first_label),
        "soft": (
            functional.multilabel_soft_margin_loss,
            nn.MultiLabelSoftMarginLoss,
            torch.clone,
            _binary,
        ),
    }[name]


def _binary(t: Tensor) -> Tensor:
    return (t > 0).to(t)


def _first_label(t: Tensor) -> Tensor:
    """One class a sample, and -1 after it, as multilabel_margin_loss has it."""
    labels = torch.full(t.shape, -1)
    labels[:, 0] = (t[:, 0] > 0).long()
    return labels


ELEMENTWISE = ("mse", "l1", "smooth_l1", "huber", "bce", "logits", "kl", "poisson", "soft_margin", "hinge")
OF_ROWS = ("multi", "labels", "soft")


@st.composite
def of_elements(draw: Any, names: tuple[str, ...] = (*ELEMENTWISE, *OF_ROWS)) -> tuple[Any, nn.Module, Tensor, Tensor]:
    name = draw(st.sampled_from(names))
    function, cls, last, make = elementwise(name)
    n, words = draw(st.integers(1, 6)), None if name in OF_ROWS else draw(st.sampled_from([None, 3]))
    inputs = torch.randn((n, FEATURES) if words is None else (n, words, FEATURES), dtype=torch.float64)
    targets = make(torch.randn((n, CLASSES) if words is None else (n, CLASSES, words), dtype=torch.float64))
    reduction = draw(st.sampled_from(["mean", "sum", *(["batchmean"] if name == "kl" else [])]))
    loss = draw(st.sampled_from([partial(function, reduction=reduction), cls(reduction=reduction)]))
    return loss, model(last=last), inputs, targets


def refused_as_nothing(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> bool:
    """Whether the mean over the whole batch is one over nothing."""
    return bool(loss(outputs, targets).isnan())


@given(st.one_of(of_classes(), of_elements()), st.integers(1, 6), st.sampled_from(sorted(WATCHED)), st.booleans())
@examples(fast=80, thorough=3000)
def test_every_split_gives_the_loss_of_torch_on_the_whole_batch(case: Any, size: int, watch: str, unread: bool) -> None:
    """Neighbours: probabilities, label smoothing with class weights that are 0, words, each reduction, other losses."""
    loss, module, inputs, targets = case
    hypothesis.assume(not refused_as_nothing(loss, module(inputs), targets))
    wanted = by_hand(module, lambda module: loss(module(inputs), targets))
    with weights_stay_on_their_device() if unread else contextlib.nullcontext():
        same(trained(module, (inputs, targets), loss=loss, microbatch_size=size, watch=WATCHED[watch]), wanted)


@given(st.one_of(of_classes(), of_elements()), st.data())
@examples(fast=40, thorough=1500)
def test_an_evaluation_gives_the_loss_of_torch_on_all_the_data(case: Any, data: Any) -> None:
    """Data in batches of unequal sizes, in microbatches, is one batch."""
    loss, module, inputs, targets = case
    wanted = loss(module(inputs), targets).detach()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(inputs)), max_size=2)) | {0, len(inputs)})
    batches = [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise(cuts)]
    evaluator = pl.Evaluator(
        batches, microbatch_size=data.draw(st.sampled_from([None, 1, 2])), metrics=pl.metrics.loss()
    )
    with weights_stay_on_their_device() if data.draw(st.booleans()) else contextlib.nullcontext():
        found = pl.run(pl.evaluate(module, {"test": evaluator}, loss=loss)).metrics["test"]["loss"]
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=1e-12, atol=1e-13, equal_nan=True)
    assert found.dtype is torch.float64 or found.isnan()


@pytest.mark.slow
@given(st.one_of(of_classes(), of_elements(names=(*ELEMENTWISE, "multi", "soft"))), st.integers(1, 6))
@examples(fast=10, thorough=300)
@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_gives_it_too(case: Any, size: int) -> None:
    """Not of ``multilabel_margin_loss``: what torch 2.13 makes of that in a graph is another number than eagerly."""
    loss, module, inputs, targets = case
    hypothesis.assume(not refused_as_nothing(loss, module(inputs), targets))
    wanted = by_hand(module, lambda module: loss(module(inputs), targets))
    same(trained(module, (inputs, targets), loss=loss, microbatch_size=size, compile=True), wanted)


ON_RANKS: dict[str, Any] = {
    "ignored": functional.cross_entropy,
    "weighted": partial(functional.cross_entropy, weight=torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_ranks_give_it_too(kind: Any) -> None:
    """Targets are such that rank 0 has one that counts, and in a second batch none."""
    torch.manual_seed(3)
    data = [
        (torch.randn(6, FEATURES, dtype=torch.float64), torch.tensor(targets))
        for targets in ([-100, 1, -100, 0, 1, -100], [-100, -100, -100, 0, 1, 0])
    ]

    def program(rank: int) -> dict[Any, Any]:
        found = {}
        for name, loss in ON_RANKS.items():
            for size in (None, 1, 2):
                for index, batch in enumerate(data):
                    options = {"loss": loss, "microbatch_size": size, "parallel": Parallel(kind=kind), "watch": None}
                    stream = pl.fit(model(), [batch], optimizer=pl.optim.sgd(lr=1.0), max_duration="1ba", **options)
                    loss_of_batch = None
                    for event, state in stream:
                        if event is Event.AFTER_TRAIN_BATCH:
                            loss_of_batch = state.loss
                    evaluator = pl.Evaluator([batch], microbatch_size=size)
                    metrics = pl.run(pl.evaluate(model(), evaluator, loss=loss, parallel=Parallel(kind=kind))).metrics
                    module = state.module()
                    found[name, size, index] = (loss_of_batch, dict(module.named_parameters()), metrics["eval"]["loss"])
        return found

    for found in shared_pool(2, checked=False).run(program):
        for (name, _, index), (loss, params, measured) in found.items():
            inputs, targets = data[index]
            right, grads = by_hand(model(), lambda module: ON_RANKS[name](module(inputs), targets))
            before = dict(model().named_parameters())
            same((loss, {name: (before[name] - each).detach() for name, each in params.items()}), (right, grads))
            torch.testing.assert_close(measured, right, rtol=1e-12, atol=1e-13)


def test_each_loss_of_torch_is_in_the_table_or_takes_more_than_outputs_and_targets() -> None:
    """A loss that torch adds is looked at before it weighs its samples."""
    others = {"ctc_loss", "gaussian_nll_loss", "linear_cross_entropy"}
    others |= {
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    }
    names = {name for name in dir(functional) if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"}
    names -= {"adaptive_log_softmax_with_loss"}
    functions = {name: getattr(functional, name) for name in names if inspect.isfunction(getattr(functional, name))}
    assert {name for name, function in functions.items() if implied_by(function) is None} <= others
    modules = {name: getattr(nn, name) for name in nn.modules.loss.__all__ if hasattr(nn, name)}
    parametric = {"LinearCrossEntropyLoss"}
    deprecated = {"NLLLoss2d"}  # a subclass of NLLLoss, with its forward
    makes = {name: cls for name, cls in modules.items() if len(inspect.signature(cls.forward).parameters) == 3}
    assert not {name for name in makes.keys() - parametric - deprecated if implied_by(makes[name]()) is None}


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: functional.cross_entropy(outputs, targets),
        Focal(),
        partial(functional.mse_loss, weight=torch.ones(())),
        partial(functional.cross_entropy, torch.zeros(1, 2)),
        partial(functional.cross_entropy, reduction="none"),
        functional.triplet_margin_loss,
    ],
    ids=["a function", "a subclass", "weighted elements", "another argument", "none", "three arguments"],
)
def test_where_it_can_not_be_known_a_part_weighs_its_samples(loss: Any) -> None:
    assert implied_by(loss) is None


@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": True}, {"reduce": False}])
def test_the_old_names_of_the_reduction_are_read(legacy: dict[str, bool]) -> None:
    found = implied_by(partial(functional.mse_loss, **legacy))
    assert (
        found is None if legacy == {"reduce": False} else found is not None and found.summed is ("reduce" not in legacy)
    )


def test_a_weight_of_the_users_own_comes_first() -> None:
    """As documented: samples, though the loss is a mean over targets that are not ignored."""
    inputs, targets = torch.randn(4, FEATURES, dtype=torch.float64), torch.tensor([0, -100, 1, 2])
    wanted = by_hand(
        model(),
        lambda module: sum(  # type: ignore[arg-type, return-value]
            functional.cross_entropy(module(inputs[i : i + 2]), targets[i : i + 2]) / 2 for i in (0, 2)
        ),
    )
    task = pl.Task(weight=lambda batch: len(batch[1]))
    same(trained(model(), (inputs, targets), loss=functional.cross_entropy, task=task, microbatch_size=2), wanted)


@pytest.mark.parametrize("unread", [False, True])
def test_smoothed_targets_of_class_weight_0_alone_are_an_error(unread: bool) -> None:
    """Their loss, by the other classes, is divided by 0; on the whole batch it counts."""
    inputs, targets = torch.randn(3, FEATURES, dtype=torch.float64), torch.tensor([0, 1, 1])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), label_smoothing=0.1)
    wanted = by_hand(model(), lambda module: loss(module(inputs), targets))
    same(trained(model(), (inputs, targets), loss=loss), wanted)
    same(trained(model(), (inputs, targets), loss=loss, microbatch_size=2), wanted)
    place = weights_stay_on_their_device() if unread else contextlib.nullcontext()
    with place, pytest.raises(pl.NonFiniteError if unread else pl.DataError):
        trained(model(), (inputs, targets), loss=loss, microbatch_size=1)
    targets[0] = -100
    wanted = by_hand(model(), lambda module: loss(module(inputs), targets))
    same(trained(model(), (inputs, targets), loss=loss, microbatch_size=1), wanted)


@pytest.mark.parametrize("watch", sorted(WATCHED))
def test_probabilities_in_the_place_of_indices_are_refused_where_classes_have_weights(watch: str) -> None:
    inputs, targets = torch.randn(4, FEATURES, dtype=torch.float64), torch.tensor([0, 3, 1, 2])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    options: dict[str, Any] = {"algorithms": [pl.algorithms.label_smoothing(0.1)], "watch": WATCHED[watch]}
    with pytest.raises(pl.ArgumentError, match=r"CrossEntropyLoss.* has class weights.*label_smoothing="):
        trained(model(), (inputs, targets), loss=loss, microbatch_size=2, **options)
    task = pl.Task(weight=lambda batch: len(batch[1]))
    halves = trained(model(), (inputs, targets), loss=loss, task=task, microbatch_size=2, **options)
    same(halves, trained(model(), (inputs, targets), loss=loss, **options))


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


LOSSES = {"masked mean": masked_mean, "infinite": infinite, "entropy": entropy, "in parts": in_parts}
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda counted: int(counted.sum()),
    "float": lambda counted: 0.7 * int(counted.sum()),
    "integers": lambda counted: counted.sum(),
    "float32": lambda counted: counted.sum().float(),
    "of one element": lambda counted: counted.sum().double().reshape(1) * 0.3,
}


def total(loss: Any) -> Tensor:
    return loss["total"] if isinstance(loss, dict) else loss


def weighted(module: nn.Module, loss: Any, inputs: Tensor, targets: Tensor, size: int) -> Tensor:
    """The mean by hand over the parts that weigh something."""
    parts = [(inputs[i : i + size], targets[i : i + size]) for i in range(0, len(inputs), size)]
    counts = [int((part[1] != -100).sum()) for part in parts]
    losses = [total(loss(module(part[0]), part)) * n for part, n in zip(parts, counts, strict=True) if n]
    return torch.stack(losses).sum() / sum(counts)


@st.composite
def with_nothing(draw: Any) -> tuple[Tensor, Tensor]:
    """A batch in which much is ignored, and not all."""
    n = draw(st.integers(1, 6))
    targets = draw(st.lists(st.sampled_from([-100, -100, 0, 1]), min_size=n, max_size=n).filter(lambda t: max(t) >= 0))
    seed = draw(st.integers(0, 99))
    inputs = torch.randn(n, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return inputs, torch.tensor(targets)


@given(
    with_nothing(),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 6),
    st.sampled_from(sorted(WATCHED)),
    st.booleans(),
)
@examples(fast=80, thorough=3000)
def test_a_part_of_weight_0_counts_for_nothing(
    batch: Any, loss: str, kind: str, size: int, watch: str, unread: bool
) -> None:
    """Neighbours: any loss, numbers and tensors that can't be read, the first part, the last, all but one."""
    inputs, targets = batch
    wanted = by_hand(model(), lambda module: weighted(module, LOSSES[loss], inputs, targets, size))
    task = pl.Task(loss=LOSSES[loss], weight=lambda batch: KINDS[kind](batch[1] != -100))
    with weights_stay_on_their_device() if unread else contextlib.nullcontext():
        found, grads = trained(model(), batch, task=task, microbatch_size=size, watch=WATCHED[watch])
        same((total(found), grads), wanted)
        measured = pl.run(
            pl.evaluate(model(), pl.Evaluator([batch], microbatch_size=size, metrics=pl.metrics.loss()), task=task)
        )
    torch.testing.assert_close(measured.metrics["eval"]["loss"], wanted[0], rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("every_gradient_is_large")
@pytest.mark.parametrize("watch", sorted(WATCHED))
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_it_does_so_where_gradients_are_added_up_in_place(loss: str, unread: bool, watch: str) -> None:
    """As those of large models are; their hooks would add a NaN."""
    batch = torch.randn(5, FEATURES, dtype=torch.float64), torch.tensor([0, -100, 1, -100, 0])
    wanted = by_hand(model(), lambda module: weighted(module, LOSSES[loss], *batch, 1))
    task = pl.Task(loss=LOSSES[loss], weight=lambda batch: (batch[1] != -100).sum())
    with weights_stay_on_their_device() if unread else contextlib.nullcontext():
        found, grads = trained(model(), batch, task=task, microbatch_size=1, watch=WATCHED[watch])
    same((total(found), grads), wanted)


@pytest.mark.usefixtures("interpreted")
def test_it_does_so_in_one_graph() -> None:
    """Of weights that are integers the loss was rounded to float32 there."""
    batch = torch.randn(3, FEATURES, dtype=torch.float64), torch.tensor([-100, 0, 1])
    wanted = by_hand(model(), lambda module: weighted(module, masked_mean, *batch, 1))
    task = pl.Task(loss=masked_mean, weight=lambda batch: (batch[1] != -100).sum())
    same(trained(model(), batch, task=task, microbatch_size=1, compile=True), wanted)


@pytest.mark.slow
@given(with_nothing(), st.sampled_from(sorted(LOSSES)), st.sampled_from(["integers", "float32"]), st.integers(1, 3))
@examples(fast=12, thorough=400)
@pytest.mark.usefixtures("interpreted")
def test_it_does_so_in_a_compiled_step(batch: Any, loss: str, kind: str, size: int) -> None:
    inputs, targets = batch
    wanted = by_hand(model(), lambda module: weighted(module, LOSSES[loss], inputs, targets, size))
    task = pl.Task(loss=LOSSES[loss], weight=lambda batch: KINDS[kind](batch[1] != -100))
    for watch in ({Event.BATCH_END}, {Event.BEFORE_FORWARD, Event.BATCH_END}, {Event.AFTER_LOSS, Event.BATCH_END}):
        found, grads = trained(model(), batch, task=task, microbatch_size=size, compile=True, watch=watch)
        same((total(found), grads), wanted)


@pytest.mark.usefixtures("interpreted")
def test_counts_of_targets_need_no_graph_each() -> None:
    """Between graphs weights are numbers on the host, and a graph holds a number for ever."""
    torch.manual_seed(0)
    data = [(torch.randn(4, FEATURES), torch.tensor([0] * i + [-100] * (4 - i))) for i in (4, 3, 2, 1, 3, 4)]
    module = Words()
    with pl.compile.record() as compilations:
        pl.run(
            pl.fit(
                module, data, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep",
                microbatch_size=2, compile=True, watch={Event.BEFORE_FORWARD},
            )
        )  # fmt: skip
    assert [each.segment for each in compilations].count("microbatch") <= 2


@pytest.mark.parametrize("watch", sorted(WATCHED))
@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("kind", ["int", "integers"])
@pytest.mark.parametrize("unread", [False, True])
def test_a_batch_of_weight_0_is_an_error_or_is_left_out(watch: str, size: Any, kind: str, unread: bool) -> None:
    """Its loss is a mean over nothing, NaN, and is treated as one, also where the user's loss is a number."""
    inputs = torch.randn(4, FEATURES, dtype=torch.float64)
    nothing, something = torch.full((4,), -100), torch.tensor([0, 1, 2, 3])
    task = pl.Task(loss=lambda outputs, batch: outputs.square().mean(), weight=lambda b: KINDS[kind](b[1] != -100))
    settings = {
        "task": task, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "1ep", "microbatch_size": size,
        "watch": WATCHED[watch],
    }  # fmt: skip
    with weights_stay_on_their_device() if unread else contextlib.nullcontext():
        stream = pl.fit(model(), [(inputs, something), (inputs, nothing)], **settings)
        with pytest.raises((pl.DataError, pl.NonFiniteError), match="batch 1"):
            pl.run(stream)
        data = [(inputs, something), (inputs, nothing), (inputs, something)]
        skipping = pl.run(pl.fit(model(), data, nonfinite="skip", **settings))
        without = pl.run(pl.fit(model(), data[::2], **settings))
    assert int(skipping.skipped) == 1
    for name, tensor in without.params.items():
        assert torch.equal(tensor, skipping.params[name])


def test_an_evaluation_of_nothing_is_nan() -> None:
    data = [(torch.randn(2, FEATURES), torch.full((2,), -100))]
    metrics = pl.run(pl.evaluate(Words(), data, loss=functional.cross_entropy)).metrics["eval"]
    assert metrics["loss"].isnan()
    assert metrics["accuracy"].isnan()


def test_a_metric_of_the_loss_is_not_shown_what_counts_for_nothing() -> None:
    largest = pl.Metric(
        "largest",
        lambda: torch.tensor(-torch.inf),
        lambda accumulator, measured, batch: torch.maximum(accumulator, measured[0]),
        lambda accumulator: accumulator,
        of_loss=True,
    )
    inputs = torch.randn(4, FEATURES)
    data = [(inputs, torch.full((4,), -100)), (inputs, torch.tensor([0, 1, -100, -100]))]
    module = Words()
    state = pl.run(pl.evaluate(module, pl.Evaluator(data, metrics=largest), loss=functional.cross_entropy))
    torch.testing.assert_close(
        state.metrics["eval"]["largest"], functional.cross_entropy(module(inputs), data[1][1]).detach()
    )


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (lambda batch: None, ["NoneType", "return"]),
        (lambda batch: torch.ones(3), ["shape (3,)"]),
        (lambda batch: "2", ["'2'", "type str"]),
        (lambda batch: -1, ["-1", "not negative"]),
        (lambda batch: float("nan"), ["nan", "finite"]),
    ],
)
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_weight_is_a_number(weight: Any, words: list[str], evaluating: bool) -> None:
    data = [(torch.randn(4, FEATURES), torch.tensor([0, 1, 2, 3]))]
    task = pl.Task(loss=entropy, weight=weight)
    if evaluating:
        stream = pl.evaluate(Words(), data, task=task)
    else:
        settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba", "microbatch_size": 2}
        stream = pl.fit(Words(), data, task=task, **settings)
    with pytest.raises(pl.DataError) as caught:
        pl.run(stream)
    assert all(word in str(caught.value) for word in words)


# Accuracy.


class Given(nn.Module):
    """Outputs that are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_accuracy_ignores_what_the_loss_ignores() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])

    def measured(loss: Any, targets: list[int]) -> float:
        data = [(scores, torch.tensor(targets))]
        return float(pl.run(pl.evaluate(Given(), data, loss=loss)).metrics["eval"]["accuracy"])

    assert measured(functional.cross_entropy, [0, 1, -100, -100]) == 1.0
    assert measured(partial(functional.cross_entropy, ignore_index=1), [0, 1, 1, 0]) == 1.0
    assert measured(nn.CrossEntropyLoss(ignore_index=0), [1, 1, 0, 0]) == 0.5
    assert measured(lambda outputs, targets: outputs.mean(), [0, 1, -100, 1]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("last", [True, False])
def test_accuracy_finds_the_classes_by_the_shape_of_the_targets(last: bool) -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(5, 3, 4), torch.randint(4, (5, 3))
    wanted = (scores.argmax(-1) == targets).float().mean()
    outputs = scores if last else scores.movedim(-1, 1)
    loss = lambda outputs, targets: outputs.mean()  # noqa: E731
    metrics = pl.run(pl.evaluate(Given(), [(outputs, targets)], loss=loss)).metrics["eval"]
    torch.testing.assert_close(metrics["accuracy"], wanted)


def test_accuracy_is_refused_where_two_axes_fit_and_nothing_says_which() -> None:
    """(n, words, classes) with as many words as classes: by axis 1 it was that of other numbers."""
    torch.manual_seed(0)
    scores, targets = torch.randn(5, 4, 4), torch.randint(4, (5, 4))
    data, own = [(scores, targets)], lambda o, t: functional.cross_entropy(o.flatten(0, 1), t.flatten())
    with pytest.raises(pl.DataError, match=r"axis 1 or along the last one.*\(5, 4, 4\).*accuracy\(axis=-1\)"):
        pl.run(pl.evaluate(Given(), data, loss=own))
    for axis in (1, -1):
        metrics = [pl.metrics.loss(), pl.metrics.accuracy(axis=axis)]
        found = pl.run(pl.evaluate(Given(), pl.Evaluator(data, metrics=metrics), loss=own)).metrics["eval"]
        torch.testing.assert_close(found["accuracy"], (scores.argmax(axis) == targets).float().mean())
    # Torch's own loss has its classes along axis 1.
    found = pl.run(pl.evaluate(Given(), data, loss=functional.cross_entropy)).metrics["eval"]
    torch.testing.assert_close(found["accuracy"], (scores.argmax(1) == targets).float().mean())


@pytest.mark.parametrize("options", [{"axis": "last"}, {"ignore_index": 0.5}, {"axis": True}])
def test_what_accuracy_is_told_is_checked(options: dict[str, Any]) -> None:
    with pytest.raises(pl.ArgumentTypeError, match="whole number"):
        pl.metrics.accuracy(**options)
