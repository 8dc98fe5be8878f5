"""Tasks of Transformers and of detection: however a batch is split, the gradient is that of the whole one, by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.samples import num_samples, split
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, LossError
from pure_loop.random import seeded
from tests.support.extras import needs
from tests.support.problem import close, noise
from tests.support.refused import Refusal, check, rows
from tests.support.tiers import examples

WORDS, CLASSES = 7, 3
cross_entropy = nn.functional.cross_entropy


@attrs.frozen
class Output:
    loss: Tensor | None
    logits: Tensor


class ForTokenClassification(nn.Module):
    """It is called as a model of Transformers is."""

    def __init__(self, outputs: int = WORDS) -> None:
        super().__init__()
        with seeded(0):
            self.words, self.head = nn.Embedding(WORDS, 4).double(), nn.Linear(4, outputs).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.scores(self.words(input_ids), attention_mask)
        return Output(None if labels is None else self.compare(logits, labels), logits)

    def scores(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.head(states)  # type: ignore[no-any-return]

    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, -2), labels.flatten())


class ForCausalLM(ForTokenClassification):
    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().compare(logits[:, :-1], labels[:, 1:])


class ForSequenceClassification(ForTokenClassification):
    def scores(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.head((states * mask[..., None]).sum(dim=1))  # type: ignore[no-any-return]


class RegressionForSequenceClassification(ForSequenceClassification):
    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(logits, labels)


class Plain(ForCausalLM):
    """A name that says nothing."""


OF_TOKENS = (ForTokenClassification, ForCausalLM)
OF_SAMPLES = (ForSequenceClassification, RegressionForSequenceClassification)


def texts(kind: type, lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A batch as tokenizers and their collators make it: padding has the label -100."""
    random = noise(seed)
    ids = torch.randint(WORDS, (len(lengths), max(lengths)), generator=random)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = torch.randint(WORDS, ids.shape, generator=random).masked_fill(mask == 0, -100)
    if kind is ForSequenceClassification:
        labels = labels[:, 0]
    if kind is RegressionForSequenceClassification:
        labels = torch.randn(len(lengths), WORDS, generator=random, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, batch: Any, **settings: Any) -> tuple[pl.State, dict[str, Any]]:
    settings = {"optimizer": pl.optim.sgd(lr=1.0), "max_duration": "1ba", "strict": True, **settings}
    ends = [state for event, state in pl.fit(model, [batch], **settings) if event is Event.AFTER_TRAIN_BATCH]
    return ends[0], {name: ends[0].grads[name] for name in ends[0].grads}


def agrees(model: nn.Module, loss: Tensor, state: pl.State, found: dict[str, Any], tolerance: float = 1e-10) -> None:
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    close(found, dict(zip(dict(model.named_parameters()), wanted, strict=True)), tolerance)
    value = state.loss["total"] if isinstance(state.loss, dict) else state.loss
    torch.testing.assert_close(value, loss.detach(), rtol=tolerance, atol=tolerance)


@examples(12, 200)
@given(
    kind=st.sampled_from([*OF_TOKENS, *OF_SAMPLES]),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda lengths: max(lengths) > 1),
    size=st.integers(1, 5),
)
def test_a_microbatch_of_texts_weighs_its_labels(kind: type, lengths: list[int], size: int) -> None:
    model, batch = kind(), texts(kind, lengths)
    state, found = gradients(model, batch, loss=pl.Task.from_transformers(), microbatch_size=size)
    agrees(model, model(**batch).loss, state, found)
    # An evaluation in parts is that of the whole.
    both = [{name: each[:1] for name, each in batch.items()}, {name: each[1:] for name, each in batch.items()}]
    data = pl.Evaluator([each for each in both if len(each["labels"])], microbatch_size=size)
    measured = pl.run(pl.evaluate(model, data, loss=pl.Task.from_transformers())).metrics["eval"]
    close({"loss": measured["loss"]}, {"loss": model(**batch).loss.detach()}, 1e-10)


def test_metrics_are_given_logits_and_the_labels_that_the_loss_compares_them_with() -> None:
    task = pl.Task.from_transformers()
    for kind in (*OF_TOKENS, ForSequenceClassification):
        model, batch = kind(), texts(kind, [3, 5, 2])
        logits, labels = model(**batch).logits, batch["labels"]
        if kind is ForCausalLM:
            logits, labels = logits[:, :-1], labels[:, 1:]
        right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
        seen = pl.metrics.mean(lambda outputs, batch: (batch[0]["input_ids"][:, 0] == 0).float(), "seen")
        evaluator = pl.Evaluator([batch], metrics=[pl.metrics.accuracy(), seen])
        settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.0), "max_duration": "1ep", "train_metrics": seen}
        state = pl.run(pl.fit(model, [batch], loss=task, evaluators={"own": evaluator, "val": [batch]}, **settings))
        assert state.metrics["own"]["accuracy"] == state.metrics["val"]["accuracy"] == right
        assert state.metrics["own"]["seen"] == state.metrics["train"]["seen"]
        del batch["labels"]
        (predicted,) = [s.outputs for e, s in pl.predict(model, [batch], task=task) if e is Event.PREDICT_BATCH_END]
        assert torch.equal(predicted, model(**batch).logits)


def test_durations_in_tokens_count_no_padding() -> None:
    run = partial(pl.fit, loss=pl.Task.from_transformers(), optimizer=pl.optim.sgd(lr=0.1))
    batch = texts(ForCausalLM, [3, 5, 2])
    assert pl.run(run(ForCausalLM(), [batch] * 4, max_duration="20tok")).timestamp.token == 20
    batch["attention_mask"] = batch["attention_mask"].new_ones(3, 1, 5)
    assert pl.Task.from_transformers().tokens(batch) == 15


def test_the_class_says_whether_labels_are_shifted_or_the_user_does() -> None:
    batch = texts(Plain, [3, 5, 2])
    for task in (pl.Task.from_transformers(shifted=True), pl.Task.from_transformers()):
        assert task.of_model(ForCausalLM()).weigh(batch) == 7
    assert pl.Task.from_transformers(shifted=False).of_model(ForCausalLM()).weigh(batch) == 10
    # What the user has replaced stays.
    for field, other, length in (("targets", "weight", 7), ("weight", "targets", 5)):
        task = attrs.evolve(pl.Task.from_transformers(), **{field: len}).of_model(ForCausalLM())
        assert getattr(task, field) is len
        number = getattr(task, other)(batch)
        assert (number if number.ndim == 0 else number.shape[1]) == length
    assert attrs.evolve(task, weight=len).of_model(ForPreTraining()).weight is len
    own = pl.Evaluator([batch], loss=pl.Task.from_transformers())
    assert "loss" in pl.run(pl.evaluate(ForCausalLM(), own)).metrics["eval"]


@pytest.mark.slow  # a real library: its import takes seconds
@needs("transformers")
def test_models_of_transformers() -> None:
    import transformers

    small = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        **small, intermediate_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3
    )
    gpt = transformers.GPT2Config(
        **small, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1
    )
    t5 = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    for make, kind in (
        (lambda: transformers.GPT2LMHeadModel(gpt), ForCausalLM),
        (lambda: transformers.BertForMaskedLM(bert), ForTokenClassification),
        (lambda: transformers.T5ForConditionalGeneration(t5), ForTokenClassification),
        (lambda: transformers.BertForSequenceClassification(bert), ForSequenceClassification),
    ):
        with seeded(0):
            model = make().train()
        batch = texts(kind, [3, 5, 2])
        batch["labels"] = batch["labels"].clamp(max=2)
        loss = model(**batch).loss
        wanted = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for size in (1, 2):
            _, found = gradients(
                model, transformers.BatchEncoding(batch), loss=pl.Task.from_transformers(), microbatch_size=size
            )
            for gradient, each in zip(wanted, found.values(), strict=True):
                torch.testing.assert_close(each, gradient, rtol=1e-4, atol=1e-6)


# Detection.


class Detector(nn.Module):
    """Losses of images in train mode, and a mapping for each in eval mode, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.layer = nn.Conv2d(2, 4, 1).double()

    def forward(self, images: Any, targets: Any = None) -> Any:
        boxes = [self.layer(image[None]).mean(dim=(0, 2, 3)) for image in images]
        if not self.training:
            return [{"boxes": box[None], "scores": box[:1]} for box in boxes]
        far = [(box - target["boxes"]).square().sum() for box, target in zip(boxes, targets, strict=True)]
        size = [box.abs().sum() * len(target["boxes"]) for box, target in zip(boxes, targets, strict=True)]
        return {"boxes": torch.stack(far).mean(), "size": torch.stack(size).mean()}


def pictures(counts: list[int], rows: int | None = None, seed: int = 0) -> Any:
    """Images, and as many boxes in each as ``counts`` says; ``rows``: all images are of one size."""
    random = noise(seed)
    sizes = [(rows, rows) if rows else (3 + place, 5 - place % 3) for place in range(len(counts))]
    images = [torch.randn(2, *size, generator=random, dtype=torch.float64) for size in sizes]  # type: ignore[misc]
    return images, [{"boxes": torch.randn(n, 4, generator=random, dtype=torch.float64), "id": 7} for n in counts]


COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(counts=COUNTS, rows=st.sampled_from([None, 2, 4]), size=st.integers(1, 5), kind=st.integers(0, 3))
def test_images_with_boxes_are_counted_and_split_whatever_their_sizes(
    counts: list[int], rows: int | None, size: int, kind: int
) -> None:
    """Also where all images have as many channels as boxes: what a batch is does not depend on its numbers."""
    images, targets = pictures(counts, rows)
    ids, named = torch.arange(len(counts)), {"images": images, "targets": targets}
    batch = [(images, targets), [tuple(images), tuple(targets)], named, (images, targets, ids)][kind]
    assert num_samples(batch) == len(counts)
    pieces = [list(piece.values()) if kind == 2 else piece for piece in split(batch, size)]
    cut = range(0, len(counts), size)
    assert [len(piece[0]) for piece in pieces] == [len(counts[start : start + size]) for start in cut]
    for place, items in enumerate((images, targets)):
        found = [item for piece in pieces for item in piece[place]]
        assert all(a is b for a, b in zip(found, items, strict=True))
    assert kind < 3 or [each.tolist() for *_, each in pieces] == [ids[start : start + size].tolist() for start in cut]


@given(rows=st.integers(2, 5), channels=st.integers(2, 5), masks=st.booleans(), n=st.integers(1, 5))
def test_images_without_boxes_are_counted_where_they_can_be_nothing_else(
    rows: int, channels: int, masks: bool, n: int
) -> None:
    targets = [{"masks": torch.zeros(rows, 4, 4)} if masks else {"label": torch.tensor(1)} for _ in range(n)]
    batch = ([torch.zeros(channels, 4, 4)] * n, targets)
    for call in (num_samples, partial(split, size=1)):
        if masks and rows != channels:
            assert call(batch) == n if call is num_samples else len(call(batch)) == n
        else:
            with pytest.raises(DataError, match=rf"{n} images.*{channels} rows.*pl.Task.detection\(\).*samples="):
                call(batch)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
def test_parts_of_a_batch_that_are_no_images_are_no_samples(shape: tuple[int, ...]) -> None:
    batch = ([torch.zeros(shape), torch.ones(shape)], [{"boxes": torch.zeros(4, 4)}, {"b": torch.ones(4)}])
    assert num_samples(batch) == 4
    assert [[len(part) for part in inputs] for inputs, _ in split(batch, 3)] == [[3, 3], [1, 1]]


@examples(8, 100)
@given(counts=COUNTS, size=st.integers(1, 5))
def test_a_microbatch_of_images_weighs_its_images(counts: list[int], size: int) -> None:
    model, batch = Detector(), pictures(counts)
    state, found = gradients(model, batch, loss=pl.Task.detection(), microbatch_size=size)
    losses = model(*batch)
    agrees(model, losses["boxes"] + losses["size"], state, found)
    assert list(state.loss) == ["total", "boxes", "size"]


def test_detection_is_evaluated_by_metrics_and_predicts_what_the_model_finds() -> None:
    task, batch = pl.Task.detection(), pictures([2, 0, 3])
    boxes = pl.metrics.mean(lambda found, batch: torch.tensor([float(len(b["boxes"])) for b in batch[1]]), "boxes")
    settings: dict[str, Any] = {"loss": task, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    state = pl.run(pl.fit(Detector(), [batch], evaluators=pl.Evaluator([batch], metrics=boxes), **settings))
    assert state.metrics["eval"]["boxes"] == 5 / 3
    stream = pl.predict(state, [(batch[0], None)], task=task)
    (found,) = [state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END]
    assert torch.equal(found[2]["boxes"], state.module(training=False)(batch[0])[2]["boxes"])


def text(model: Any = ForCausalLM, task: Any = None, kind: Any = dict, without: str = "", **changes: Any) -> pl.Stream:
    batch = texts(ForCausalLM, [3, 5]) | changes
    batch.pop(without, None)
    return gradients_of(model(), kind(batch), pl.Task.from_transformers() if task is None else task)


def image(batch: Any = None, **settings: Any) -> pl.Stream:
    return gradients_of(Detector(), pictures([1, 2]) if batch is None else batch, pl.Task.detection(), **settings)


def gradients_of(model: nn.Module, batch: Any, task: pl.Task, **settings: Any) -> pl.Stream:
    return pl.fit(model, [batch], loss=task, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", **settings)


class ForPreTraining(ForCausalLM):
    """Its loss is not known to be a mean over labels."""


NO_MEAN = ["CTC", "PreTraining", "SemanticSegmentation", "ObjectDetection", "QuestionAnswering", "CausalLMAndMore"]


def no(call: Any, error: type[Exception], *says: str, at_once: bool = False) -> Refusal:
    return Refusal(says[0], call, error, says, at_once)


FIRST, SHIFTED, BOXES = pictures([1, 2])[0], pl.Task.from_transformers(shifted=True), [pictures([1])]
REFUSED = [
    no(lambda: text(without="labels"), DataError, "has no 'labels'", "pl.Task.from_transformers", "collator"),
    no(lambda: text(labels=[{}, {}]), DataError, "of type list", "weight="),
    no(lambda: text(kind=lambda b: (*b.values(),), task=attrs.evolve(SHIFTED, weight=None)), DataError, "a mapping"),
    no(lambda: text(Plain), DataError, "class Plain", "shifted=True", "shape (2, 5)"),
    *(
        no(lambda kind=kind: text(type(kind, (Plain,), {})), ArgumentError, f"{kind} is not known", at_once=True)
        for kind in (f"For{name}" for name in NO_MEAN)
    ),
    no(lambda: pl.Task.from_transformers(shifted=1), ArgumentTypeError, "shifted", "True or F", at_once=True),
    no(lambda: text(task=pl.Task(loss=cross_entropy)), DataError, "tensor (2, 5)", "pl.Task.from_transformers()"),
    no(lambda: image(FIRST), DataError, "pl.Task.detection: a batch is (images, targets)", "tuple(zip(*rows))"),
    no(lambda: image((FIRST, [{}])), DataError, "It is ([tensor (2, 3, 5) float64", "[{}])"),
    no(lambda: image(evaluators=BOXES), LossError, "boxes, and has no loss", "metrics=", "before training"),
    no(lambda: pl.evaluate(Detector(), BOXES, loss=pl.Task.detection()), LossError, "evaluator 'eval'", "no loss"),
]


@rows(REFUSED)
def test_refused(refusal: Refusal) -> None:
    check(refusal)
