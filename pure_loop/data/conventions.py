"""Batches and outputs as two libraries have them: those of Transformers, and those of detection in torchvision.

:class:`pure_loop.Task` makes tasks of these functions; neither library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs
from torch import Tensor
from torch.nn.functional import pad

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.suggestions import nearest
from pure_loop._internal.weights import has_numbers
from pure_loop.data.batch import describe
from pure_loop.data.samples import num_tokens
from pure_loop.errors import ArgumentError, DataError, LossError

# Images, each of shape (channels, height, width), and a mapping of each.
Detections: TypeAlias = tuple[Any, Any]

_IGNORED = -100
# Endings of classes with such a loss. Others have several losses (pretraining), another index of what is ignored
# (segmentation), or no label of each token or sample (CTC, detection, question answering).
_MEAN_OVER_LABELS = re.compile(
    "For(CausalLM|MaskedLM|Seq2SeqLM|(Token|Sequence|Image|Video|Audio)Classification|MultipleChoice)$"
    "|LMHeadModel$|(?<!TTS)ForConditionalGeneration$"
)


def _labels(batch: Batch) -> Tensor:
    """
    Raises:
        DataError: a batch without them, or with others than tensors, or one that is no mapping.
    """
    labels = _mapping(batch).get("labels")
    if isinstance(labels, Tensor):
        return labels
    near = nearest("labels", filter(lambda key: isinstance(key, str), batch))
    meant = f" (its {near!r} may be meant)" if near else ""
    kind = type(labels).__name__
    what = f"has no 'labels'{meant}" if labels is None else f"has 'labels' of type {kind}, and no tensor"
    raise DataError(
        f"pl.Task.from_transformers: a batch {what}: {describe(batch)}. The model computes outputs.loss from labels, "
        "which of a language model the collator adds, DataCollatorForLanguageModeling(tokenizer, mlm=False); where it "
        "is no mean over labels, write pl.Task(forward=lambda model, batch: model(**batch), loss=..., weight=...). To "
        "predict, none are needed."
    )


def _mapping(batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise DataError(
        f"pl.Task.from_transformers: the model is called with a mapping, and a batch is {describe(batch)}. Give "
        "batches such as {'input_ids': ..., 'attention_mask': ..., 'labels': ...}; (inputs, targets) of another "
        "model take loss=, without this task."
    )


def call_with_batch(model: Any, batch: Batch) -> Outputs:
    """``model(**batch)``.

    Raises:
        DataError: a batch that is no mapping.
    """
    return model(**_mapping(batch))


def own_loss(outputs: Outputs, batch: Batch) -> Tensor:
    """``outputs.loss``.

    Raises:
        DataError: a batch without labels.
        LossError: a model without a loss.
    """
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    _labels(batch)
    raise LossError(
        f"pl.Task.from_transformers: outputs are a {type(outputs).__name__} without a loss, though there are labels: "
        "load the model with a head, such as AutoModelForSequenceClassification, and with return_dict=True."
    )


def logits(outputs: Outputs) -> Any:
    """``outputs.logits``; outputs that have none as they are."""
    return getattr(outputs, "logits", outputs)


def attended(batch: Batch) -> int:
    """The tokens that ``attention_mask`` of shape (samples, length) leaves; without one, padding is included."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not has_numbers(mask):
        return num_tokens(batch)
    return int((mask != 0).sum())


@attrs.frozen
class Labels:
    """What the loss of a model of Transformers is a mean over.

    Attributes:
        shifted: whether the model compares its outputs at a token with the label of the next one; None: not known yet.
        model: the class of the model, for the error.
    """

    shifted: bool | None
    model: str = ""

    def of_model(self, model: object, *, weigh: bool = True) -> Labels:
        """These of a model: its class says whether labels are shifted, unless the user did.

        Raises:
            ArgumentError: they weigh microbatches, and the loss of its class is not known to be a mean over labels.
        """
        if self.shifted is not None:
            return self
        name = type(model).__name__
        # What it has registered for the loss of its own class, where others are around it.
        kind = str(getattr(model, "loss_type", None) or name)
        if weigh and re.search("For[A-Z]|Detection$", kind) and not _MEAN_OVER_LABELS.search(kind):
            raise ArgumentError(
                f"pl.Task.from_transformers: the loss of {name} is not known to be a mean over labels other than "
                f"{_IGNORED}, by which microbatches would be weighed: write pl.Task(forward=lambda model, batch: "
                "model(**batch), loss=lambda outputs, batch: outputs.loss, weight=lambda batch: ...)."
            )
        shifted = None
        if re.search("LMHead|CausalLM|ForConditionalGeneration", kind):
            shifted = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        elif re.search("For[A-Z]|Seq2Seq", kind):
            shifted = False
        return Labels(shifted, name)

    def weigh(self, batch: Batch) -> int | Tensor:
        """How many labels count: an int, or a tensor of shape () on their device.

        Raises:
            DataError: labels of tokens, of a model of which it is not known whether it shifts them.
        """
        labels = _labels(batch)
        if labels.is_floating_point():
            return labels.numel()
        return (self._compared(labels) != _IGNORED).sum()

    def targets(self, batch: Batch) -> Tensor:
        """The label of each of the logits; -100 where there is none."""
        labels = _labels(batch)
        compared = self._compared(labels)
        return pad(compared, (0, labels.shape[-1] - compared.shape[-1]), value=_IGNORED) if labels.ndim else labels

    def _compared(self, labels: Tensor) -> Tensor:
        if labels.ndim < 2 or labels.is_floating_point() or self.shifted is False:
            return labels
        if self.shifted is None:
            raise DataError(
                f"pl.Task.from_transformers: labels have shape {tuple(labels.shape)}, one a token, and the class "
                f"{self.model or 'of the model'} does not say whether they are those of the next tokens. Write "
                "pl.Task.from_transformers(shifted=True) for a causal language model, whose loss leaves out the first "
                "label, and shifted=False for others."
            )
        return labels[..., 1:]


def _images(batch: Batch) -> Detections:
    """
    Raises:
        DataError: a batch that is no pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and hasattr(batch[0], "__len__"):
        images, targets = batch
        if targets is None or (isinstance(targets, list | tuple) and len(targets) == len(images)):
            return images, targets
    raise DataError(
        "pl.Task.detection: a batch is (images, targets), a list of tensors of shape (channels, height, width) and a "
        f"list of a mapping for each, such as collate_fn=lambda rows: tuple(zip(*rows)) gives; to predict, (images, "
        f"None). It is {describe(batch)}."
    )


def losses_of_images(model: Any, batch: Batch) -> Outputs:
    images, targets = _images(batch)
    return model(images, targets)


def found_in_images(model: Any, batch: Batch) -> Outputs:
    return model(_images(batch)[0])


def parts_of_loss(outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
    """The losses that a detection model returns in train mode.

    Raises:
        LossError: it returned something else, as it does in eval mode.
    """
    if isinstance(outputs, Mapping):
        return outputs
    raise LossError(
        f"pl.Task.detection: the model returned a {type(outputs).__name__}; in train mode it has to return its "
        "losses, a mapping of names to tensors. In evaluation it returns boxes, and has no loss: pass metrics of them, "
        "pl.Evaluator(data, metrics=[...])."
    )


def num_images(batch: Batch) -> int:
    return len(_images(batch)[0])


def split_images(batch: Batch, size: int) -> list[Batch]:
    images, targets = _images(batch)
    places = [slice(start, start + size) for start in range(0, len(images), size)]
    return [(images[place], None if targets is None else targets[place]) for place in places]
