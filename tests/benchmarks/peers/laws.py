"""Two laws, tried on other libraries: ``python -m tests.benchmarks.peers.laws``, in the peers' environment.

Microbatches: six samples in microbatches of four and two give the gradient that they give at once. Observers: adding an
evaluation after each epoch changes nothing in what is trained, with dropout, from a shuffling DataLoader.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.peers import quiet

__all__ = ["TRAINERS", "microbatches", "observers"]

# train(model, loader, accumulate, epochs, validation loader or None): with SGD, in place; the trained module.
Train = Callable[[nn.Module, Any, int, int, Any], nn.Module]


def by_hand(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(loader):
            (F.mse_loss(model(inputs), targets) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            sum(F.mse_loss(model(inputs), targets) for inputs, targets in validate or ())
    return model


def pure_loop(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    import pure_loop as pl

    data, size = loader, None
    if accumulate > 1:
        data, size = [tuple(map(torch.cat, zip(*loader, strict=True)))], len(loader[0][0])
    stream = pl.fit(
        model,
        data,
        loss=F.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration=f"{epochs}ep",
        microbatch_size=size,
        evaluators=None if validate is None else {"val": validate},
    )
    return pl.run(stream).module()


def ignite(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss, gradient_accumulation_steps=accumulate)
    if validate is not None:
        evaluator = create_supervised_evaluator(model)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run(validate))
    trainer.run(loader, max_epochs=epochs)
    return model


def accelerate(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if isinstance(loader, DataLoader):
        loader = accelerator.prepare(loader)
        validate = None if validate is None else accelerator.prepare(validate)
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            sum(F.mse_loss(model(inputs), targets) for inputs, targets in validate or ())
    return model


def lightning(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return F.mse_loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # A list would be several loaders.
    trainer.fit(Module(), loader if isinstance(loader, DataLoader) else _Batches(loader), validate)
    return model


class _Batches:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def hf_trainer(model: nn.Module, loader: Any, accumulate: int, epochs: int, validate: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any, labels: Any) -> Any:
            outputs = self.model(inputs)
            return {"loss": F.mse_loss(outputs, labels), "logits": outputs}

    def samples(of: Any) -> list[Any]:
        return [{"inputs": x, "labels": y} for x, y in of.dataset]

    class Given(Trainer):
        """Over batches that are there already."""

        def get_train_dataloader(self) -> Any:
            return _Batches([{"inputs": x, "labels": y} for x, y in loader])

    # Its own loaders, of its own datasets, where the law is about them.
    own = isinstance(loader, DataLoader)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=epochs,
            per_device_train_batch_size=loader.batch_size if own else 1,
            gradient_accumulation_steps=accumulate,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            eval_strategy="no" if validate is None else "epoch",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (Trainer if own else Given)(
            model=Model(),
            args=arguments,
            train_dataset=samples(loader) if own else [{}],
            eval_dataset=None if validate is None else samples(validate),
            optimizers=(optimizer, None),
        ).train()
    return model


TRAINERS: dict[str, Train] = {
    "pure_loop": pure_loop,
    "by hand": by_hand,
    "Ignite": ignite,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Hugging Face Trainer": hf_trainer,
}


def _model(dropout: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5 if dropout else 0.0), nn.Linear(8, 1))


def _data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)


def microbatches(train: Train) -> float:
    """How far the step from microbatches of 4 and 2 is from that of all 6 at once, relative to its size."""
    inputs, targets = _data(6)
    before = _weights(_model())
    whole = _weights(train(_model(), [(inputs, targets)], 1, 1, None)) - before
    parts = list(zip(inputs.split(4), targets.split(4), strict=True))
    split = _weights(train(_model(), parts, 2, 1, None)) - before
    return float((split - whole).norm() / whole.norm())


def observers(train: Train) -> float:
    """How far the weights of three epochs with evaluation are from those without, relative to how far training went."""
    data = TensorDataset(*_data(16))
    found = []
    for validate in (None, DataLoader(data, batch_size=8)):
        torch.manual_seed(0)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        found.append(_weights(train(_model(dropout=True), loader, 1, 3, validate)))
    return float((found[1] - found[0]).norm() / (found[0] - _weights(_model())).norm())


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def main() -> None:
    print(f"{'':24s}{'4 + 2 instead of 6':>20s}{'with evaluation':>20s}")
    for name, train in TRAINERS.items():
        try:
            with quiet():
                found = [microbatches(train), observers(train)]
        except ImportError as error:
            print(f"{name:24s}{'not installed':>20s}  {error.name}")
            continue
        print(f"{name:24s}" + "".join(f"{'the same' if each < 1e-5 else f'{each:.0%} off':>20s}" for each in found))


if __name__ == "__main__":
    main()
