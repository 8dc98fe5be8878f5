"""What is written by habit or by mistake, what the error has to say, and what to write instead, which runs.

A row is `wrong | words of the error | right`. Its code sees the names of `names()`; a stream is run.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event

ROWS = """
state.metrics.val | ['val'] | state.metrics["val"]
state.metrics["val/accuracy"] | ['val']['accuracy'] | state.metrics['val']['accuracy']
state.params.weight | read by its name | state.params["0.weight"]
state.params["weight"] | did you mean | state.params["2.weight"]
state(X) | state.module(training=False) | state.module(training=False)(X)
state.model_state | state.params | state.params
state.state_dict() | state.module() | state.module().state_dict()
state.load_state_dict({}) | state.replace(params=...) | state.replace(params=state.params)
state.stop_training() | state.replace(stop=True) | state.replace(stop=True)
state.to("cpu") | fit(..., device=...) | fit(device="cpu")
state.lr | optimizer.lr(state.timestamp) | SGD.lr(state.timestamp)
state.global_step | state.timestamp.batch | state.timestamp.batch
state.loss = 0 | state.replace(loss=...) | state.replace(loss=torch.tensor(0.0))
state.params["0.weight"] = X | state.replace(...) | state.replace(params=dict(state.params))
state["loss"] | write state.loss | state.loss
tops["val_acc"] | write ['val']['accuracy']. | tops['val']['accuracy']
state.metrics["val_loss"] | write ['val']['loss'] | state.metrics['val']['loss']
state.metrics["val_acc"] | write ['val']['accuracy'] | state.metrics['val']['accuracy']
state.metrics["loss"] | write ['val']['loss'] | state.metrics['val']['loss']
state.metrics["train"] | train_metrics=[pl.metrics.accuracy()] | fit(train_metrics=[pl.metrics.accuracy()])
stopped.algorithm_state["mine"] | 'early_stopping'. An algorithm's | stopped.algorithm_state["early_stopping"]
anew.metrics["val"] | metrics is empty. state.metrics["val"]["loss"] comes with | fit(evaluators={"val": data})
anew.algorithm_state["mine"] | algorithm_state is empty. An algorithm's memory | anew.remember("mine", 1)
state.model(X) | state.module(training=False) | state.module(training=False)(X)
state.model.eval() | state.module(training=False) | state.module(training=False)
state.module(X) | state.module(training=False) | state.module(training=False)(X)
state.module(False) | state.module(training=False) | state.module(training=False)
state.module(train=False) | state.module(training=False) | state.module(training=False)
pl.fit(state.replace(model=regressor), data) | state.with_module(module) | state.with_module(nn.Linear(5, 2))
state.replace(timestamp=state.timestamp.next_epoch) | next_epoch() | state.timestamp.next_epoch()
state.replace(timestamp="5ba") | state.timestamp.replace( | state.replace(timestamp=state.timestamp.replace(batch=5))
state.replace(seed="x") | state.replace(seed=0) | state.replace(seed=0)
pl.Task(cross_entropy) | pl.Task(forward=..., loss= | pl.Task(loss=of_last)
pl.Task(forward=lambda batch: 1) | lambda model, batch: ... | pl.Task(forward=lambda model, batch: 1)
pl.Task(weight=lambda: 1) | lambda batch: ... | pl.Task(weight=lambda batch: 1)
pl.Metric("m", X, add, float) | lambda: ..., got | pl.Metric("m", lambda: X, add, float)
pl.Metric("m", dict, lambda a, o: a, len) | lambda accumulator, outputs, batch: ... | pl.Metric("m", dict, add, len)
metric_of(forgotten) | is a `return` missing | metric_of(add)
pl.optim.partition([SGD, SGD]) | label=lambda name, tensor: | pl.optim.partition({"a": SGD}, lambda name, tensor: "a")
pl.optim.partition({"a": SGD}, len) | lambda name, tensor: ... | pl.optim.partition({"a": SGD}, lambda n, t: "a")
pl.optim.from_torch(RADAM, model.parameters()) | gives an optimizer the parameters | pl.optim.from_torch(RADAM, lr=1e-3)
pl.optim.load_state_dict(model, SGD, DICT) | load_state_dict(state, opt | pl.optim.load_state_dict(anew, SGD, DICT)
pl.stages.update_part(model, "0", loss_of, SGD) | State.create(module) | pl.stages.update_part(anew, "0", loss_of, SGD)
fit(algorithms=[at_batch_end(Own.method)]) | instance.method | fit(algorithms=[at_batch_end(Own().method)])
of_transformers(data) | model is called with a mapping | fit()
mixing(mixup()) | (input_key="x", target_key="y") | mixing(mixup(input_key="x", target_key="y"))
mixing(label_smoothing) | (target_key="y") | mixing(pl.algorithms.label_smoothing(0.1, target_key="y"))
pl.optim.rmsprop(lr=0.1) | from_torch(torch.optim.RMSprop | pl.optim.from_torch(torch.optim.RMSprop, lr=1e-2)
pl.optim.Adam(lr=0.1) | adam(lr=3e-4) | pl.optim.adam(lr=3e-4)
pl.optim.adamw(learning_rate=0.1) | write lr=0.1 | pl.optim.adamw(lr=0.1)
pl.optim.adamw(model.parameters(), lr=0.1) | fit gives an optimizer the parameters | pl.optim.adamw(lr=0.1)
pl.optim.sgd(lr="0.1") | sgd(lr=3e-4) | pl.optim.sgd(lr=0.1)
pl.optim.sgd(lr=pl.schedules.cosine) | cosine(...) | pl.optim.sgd(lr=pl.schedules.cosine("3ep", peak=3e-4))
pl.schedules.CosineAnnealingLR("3ep") | cosine("3ep", peak=3e-4) | pl.schedules.cosine("3ep", peak=3e-4)
pl.compile(model) | compile=True | fit(compile=False)
pl.optim(lr=0.1) | pl.optim.adamw(lr=3e-4) | pl.optim.adamw(lr=3e-4)
logger.log_metrics({"a": 1}) | (metrics=..., state=state). | logger.log_metrics({"a": 1}, state)
fit(algorithms=[OfComposer()]) | @pl.algorithm(Event.BATCH_END) | fit(algorithms=[pl.algorithm(Event.BATCH_END)(same)])
fit(algorithms=["ema"]) | pl.algorithms.ema(half_life="100ba") | fit(algorithms=[pl.algorithms.ema(half_life="100ba")])
fit(algorithms=[pl.algorithms.ema]) | call it: pl.algorithms.ema(...) | fit(algorithms=[pl.algorithms.ema("9ba")])
fit(algorithms=[[label_smoothing]]) | its members themselves | fit(algorithms=[label_smoothing])
fit(algorithms=[at_batch_end(nothing)]) | return state.replace(...) | fit(algorithms=[at_batch_end(same)])
fit(algorithms=[pl.algorithm("batch_ends")(same)]) | Event.BATCH_END | fit(algorithms=[at_batch_end(same)])
pl.algorithms.MixUp(0.2) | 'mixup' | pl.algorithms.mixup(0.2)
pl.algorithms.averaged(state.module()) | is not a State | pl.algorithms.averaged(average)
pl.algorithms.restored(state.module()) | is not a State | pl.algorithms.restored(stopped)
pl.algorithms.averged(state) | 'averaged' | pl.algorithms.averaged(average)
state.save("a.pl") | pl.save(state, path) | pl.save(state, "a.pl")
state.timestamp < state.timestamp | a.batch < b.batch | state.timestamp.batch < state.timestamp.batch
pl.gradients.global_norm([X]) | global_norm(state.grads) | pl.gradients.global_norm({"x": X})
fit(callbacks=[OfLightning()]) | class OfLightning(pl.Callback) | fit(callbacks=[pl.Callback()] and [])
fit(callbacks=[pl.callbacks.SpeedMonitor]) | SpeedMonitor() | fit(callbacks=[pl.callbacks.SpeedMonitor()])
fit(callbacks=[label_smoothing]) | algorithms=[...] | fit(algorithms=[label_smoothing])
pl.callbacks.EarlyStopping() | early_stopping("val/loss") | pl.algorithms.early_stopping("val/loss")
pl.callbacks.ModelCheckpoint("runs") | CheckpointSaver(folder) | pl.callbacks.CheckpointSaver("runs")
fit(loggers=["tensorboard"]) | pl.loggers.TensorBoardLogger("runs/first") | fit(loggers=[pl.loggers.InMemoryLogger()])
fit(loggers=["csv"]) | pl.loggers.CSVLogger("metrics.csv") | fit(loggers=[])
own(log_metric=two) | mean log_metrics(self, metrics, state) | own(log_metrics=two)
own(log=two) | give it log_metrics(self, metrics, state) | own(log_audio=two)
own(log_metrics=single) | write log_metrics(self, metrics, state) | own(log_metrics=two)
own(log_images=two) | state, *, masks=None | own(log_metrics=two)
told(lambda log, s: log.log("a", 1)) | log_metrics({"loss": value}, state) | told(lambda log, s: log.log_metrics({}, s))
logger.log_metrics("a", 1.0) | log_metrics({'a': value}, state) | logger.log_metrics({"a": 1.0}, state)
told(lambda log, state: log.log_metrics({}, 3)) | and the State | told(lambda log, state: log.log_metrics({}, state))
fit(load_path=model.state_dict()) | OrderedDict of 4 is no path | (model.load_state_dict(model.state_dict()), fit())[1]
pl.load(model.state_dict(), model=model) | model.load_state_dict(weights) | model.load_state_dict(model.state_dict())
pl.load("nowhere.pl", model=model) | directory is empty | (pl.save(state, "a.pl"), pl.load("a.pl", model=model))
pl.optim.from_torch(torch.optim.RAdam(model.parameters())) | got RAdam | pl.optim.from_torch(torch.optim.RAdam, lr=0.1)
evaluated(metrics=["f1"]) | write pl.metrics.f1() | evaluated(metrics=[pl.metrics.f1()])
evaluated(metrics=[pl.metrics.f1]) | call it: pl.metrics.f1(...) | evaluated(metrics=[pl.metrics.f1()])
fit(train_metrics=["acc"]) | pl.metrics.accuracy( | fit(train_metrics=[pl.metrics.accuracy()])
pl.explain(fit()) | not the stream | pl.explain(model, data, **SETTINGS)
pl.rehearse(fit()) | not the stream | pl.rehearse(model, data, **SETTINGS)
pl.progress(fit(), desc="train") | description="train" | pl.progress(fit(), description="train", file=NOWHERE)
pl.progress(state) | pl.progress(pl.fit(...)) | pl.progress(fit(), file=NOWHERE)
pl.progress(pl.fit) | pl.progress(pl.fit(...)) | pl.progress(fit(), file=NOWHERE)
pl.run(state) | pl.run(pl.fit(...)) | pl.run(fit())
fit()[0] | for event, state in stream | next(fit())
fit().run() | pl.run(stream) | pl.run(fit())
len(fit()) | a stream has no length | list(fit())
pl.fit(model, (X, Y), **SETTINGS) | DataLoader(TensorDataset( | pl.fit(model, DataLoader(dataset, 4), **SETTINGS)
pl.fit(model, dataset, **SETTINGS) | DataLoader(dataset, | pl.fit(model, DataLoader(dataset, 4), **SETTINGS)
pl.fit(model, dicts, **SETTINGS) | loss=pl.Task( | pl.fit(model, dicts, loss=TASK, **NO_LOSS)
pl.fit(data, model, **SETTINGS) | the model comes first | pl.fit(model, data, **SETTINGS)
pl.fit("model.pt", data, **SETTINGS) | load_path=path | pl.fit(model, data, **SETTINGS)
pl.fit(nn.Linear, data, **SETTINGS) | Linear(...) | pl.fit(model, data, **SETTINGS)
pl.evaluate(nn.Identity(), data, loss=cross_entropy) | no parameters | pl.evaluate(model, data, loss=cross_entropy)
fit(loss=nn.CrossEntropyLoss) | CrossEntropyLoss() | fit(loss=nn.CrossEntropyLoss())
fit(loss="cross_entropy") | torch.nn.functional.cross_entropy | fit(loss=cross_entropy)
fit(loss=unreduced) | loss.mean() | fit(loss=cross_entropy)
fit(optimizer=torch.optim.SGD(model.parameters())) | pl.optim.sgd(lr=...) | fit(optimizer=pl.optim.sgd(lr=0.1))
fit(optimizer=pl.optim.adamw) | pl.optim.adamw(lr=3e-4) | fit(optimizer=pl.optim.adamw(lr=3e-4))
fit(epochs=3) | max_duration="3ep" | fit(max_duration="3ep")
fit(max_duration="3 epochs") | "3ep" | fit(max_duration="3ep")
fit(val_dataloader=data) | evaluators={"val": dataloader} | fit(evaluators={"val": data})
fit(evaluators=[DataLoader(dataset)]) | evaluators={"val": ... | fit(evaluators={"val": data})
fit(gradient_clip_val=1.0) | clip_grad=1.0 | fit(clip_grad=1.0)
fit(batch_size=4) | DataLoader(dataset, batch_size=4) | fit(microbatch_size=4)
fit(device="gpu") | write "cpu", "cuda" | fit(device="cpu")
fit(precision="bf16") | 'amp_bf16' | fit(precision="amp_bf16")
state.timestamp >= 3 | "3ep" | state.timestamp.batch >= 3
state.timestamp == "1ep" | >= "1ep" | state.timestamp >= "1ep"
state.timestamp % 2 | timestamp.batch | state.timestamp.batch % 2
state.timestamp.batches | timestamp.batch | state.timestamp.batch
fit(optimizer=pl.optim.sgd(lambda epoch: 0.1 * epoch)) | timestamp.epoch | pl.optim.sgd(lambda t: 0.1 * t.epoch)
Event.BATCH_ENDS | Event.BATCH_END | Event.BATCH_END
[event for event, _ in fit() if event == "on_epoch_end"] | Event.EPOCH_END | [e for e, _ in fit() if e == "epoch_end"]
pl.Trainer(max_epochs=3) | pl.fit(model, dataloader | fit()
pl.drive(forgetful(state)) | state = yield Event.BATCH_END, state | pl.drive(right(state))
pl.drive(texts(state)) | write Event.BATCH_END | pl.drive(right(state))
pl.stages.update_part(anew, "0", SGD, loss_of) | part, loss, optimizer) | pl.stages.update_part(anew, "0", loss_of, SGD)
pl.metrics.Accuracy() | accuracy( | pl.metrics.accuracy()
pl.save(model, "a.pl") | write save(state, path) | pl.save(state, "a.pl")
pl.load("a.pl") | pl.load(path, model=module) | (pl.save(state, "a.pl"), pl.load("a.pl", model=model))
pl.metrics.mean(single, "m") | such as lambda outputs, batch: | evaluated(metrics=[pl.metrics.mean(gap, "m")])
pl.stages.update_part(anew, "2", loss_of, SGD) | parameters of part '2' | pl.stages.update_part(anew, "0", loss_of, SGD)
pl.testing.check_algorithm(label_smoothing, problem="mlp") | problems=? | pl.testing.PROBLEMS["mlp"]
of(model, X, Y, mse_loss) | shape (8, 2) and targets of shape (8,): write loss= | of(model, X, Y, entropy_of_class_1)
of(regressor, X, Y.float(), mse_loss) | outputs.squeeze(-1), targets | of(regressor, X, Y.float(), squeezed)
of(regressor, X, Y.float(), partial(mse_loss)) | outputs.squeeze(-1) | of(regressor, X, Y.float(), squeezed)
of(regressor, X, Y, entropy) | outputs.squeeze(-1), targets | of(regressor, X, Y.float(), squeezed)
of(regressor, X, Y[:, None], entropy) | targets.float() | of(regressor, X, Y[:, None].float(), entropy)
of(regressor, X, Y[:, None, None], nn.L1Loss()) | targets.squeeze(-1)) | of(regressor, X, Y[:, None], nn.L1Loss())
of(pairing, X, Y) | function(outputs[...], targets) | of(pairing, X, Y, lambda outputs, y: cross_entropy(outputs[0], y))
of(silent, X, Y) | is a `return` missing | of(model, X, Y)
of(nn.Sequential(silent, model), X, Y) | is a `return` missing | of(model, X, Y)
of(model, X, Y, lambda outputs, targets: cross_entropy(targets, outputs)) | swapped | of(model, X, Y)
of(regressor, X * 9, Y[:, None].float(), nn.BCELoss()) | with_logits | of(regressor, X, Y[:, None].float(), entropy)
of(model, X, Y, backward_in) | no .backward() in a loss | of(model, X, Y)
of(model, X.double(), Y) | inputs.float() | of(model, X.double().float(), Y)
of(model, X.byte(), Y) | image.float() / 255 | of(model, X.byte().float() / 255, Y)
of(images, GREY.double(), Y) | inputs.float() | of(images, GREY.double().float(), Y)
of(nn.Linear(5, 2).bfloat16(), X, Y) | model.float() | of(nn.Linear(5, 2).bfloat16().float(), X, Y)
of(nn.Conv2d(1, 2, 4).double(), GREY, Y) | model.float() | of(images, GREY, Y)
of(images, torch.ones(8, 4, 4, 1), Y) | permute(0, 3, 1, 2) | of(images, torch.ones(8, 4, 4, 1).permute(0, 3, 1, 2), Y)
of(images, torch.ones(8, 4, 4), Y) | inputs[:, None] | of(images, torch.ones(8, 4, 4)[:, None], Y)
of(colours, GREY, Y) | expand(-1, 3, -1, -1) | of(colours, GREY.expand(-1, 3, -1, -1), Y)
of(model, X.numpy(), Y.numpy()) | torch.from_numpy(array) | of(model, torch.from_numpy(X.numpy()), Y)
of(model, ["a"] * 8, Y) | a tokenizer | of(model, X, Y)
of(product, (X, X), Y) | model(*batch[0]) | by(product, ((X, X), Y), lambda m, b: m(*b[0]))
of(product, X, Y) | model(batch[0], batch[1]) | by(product, (X, X, Y), lambda m, b: m(b[0], b[1]))
of(model, {"x": X}, Y) | model(batch[0][...]) | by(model, ({"x": X}, Y), lambda m, b: m(b[0]["x"]))
of(nn.Sequential(nn.LSTM(5, 5), model), X, Y) | (h, c) pass on | of(nn.Sequential(nn.LSTM(5, 5), first, model), X, Y)
of(model, X, ("a", "b") * 4) | classes.index(text) | of(model, X, torch.tensor(["ab".index(a) for a in "ab" * 4]))
of(model, X, Y + 2) | count from 0 | of(nn.Linear(5, 4), X, Y + 2)
of(model, X, Y.int()) | targets.long() | of(model, X, Y.int().long())
of(model, X, Y[:, None]) | targets.squeeze(1) | of(model, X, Y[:, None].squeeze(1))
of(model, X, Y, weighted(torch.ones(2).double())) | .float() for | of(model, X, Y, weighted(torch.ones(2)))
of(model, X.expand(3, 8, 5), Y.expand(3, 8)) | flatten(0, -2) | of(model, X.expand(3, 8, 5), Y.expand(3, 8), tokens)
of(nn.Sequential(model, nn.Flatten(0), nn.Unflatten(0, (4, 4))), X, Y) | x.flatten(1) | of(model, X.flatten(1), Y)
of(model, X[:, :3], Y) | write one that takes 3 | of(nn.Linear(3, 2), X[:, :3], Y)
of(words, NINES, Y) | indices 0 to n - 1 | of(nn.Sequential(nn.Embedding(10, 4), *words[1:]), NINES, Y)
of(words, X, Y) | inputs.long() | of(words, X.abs().clamp(0, 2).long(), Y)
of(normed, X[:1], Y[:1]) | drop_last=True | pl.fit(normed, DataLoader(dataset, 5, drop_last=True), **SETTINGS)
of(nn.Sequential(*overwriting, nn.ReLU(True)), X, Y) | inplace=False | of(nn.Sequential(*overwriting, nn.ReLU()), X, Y)
pl.fit(model, DataLoader(ragged, 2), **SETTINGS) | pad_sequence | pl.fit(model, padded(ragged), **SETTINGS)
pl.fit(model, DataLoader([entropy]), **SETTINGS) | has a function: make | pl.fit(model, DataLoader(dataset), **SETTINGS)
pl.fit(model, DataLoader([None]), **SETTINGS) | is a `return` missing | pl.fit(model, DataLoader(dataset), **SETTINGS)
pl.fit(model, (X.byte().div_(2.0) for _ in "a"), **SETTINGS) | image.float() / 255 | of(model, X.float() / 255, Y)
pl.ablate(model, data, **TRAIN) | ablate needs steps: | pl.ablate(model, data, algorithms=SMOOTH, steps="1ba", **TRAIN)
pl.ablate(model, data, SMOOTH) | algorithms=[...], | pl.ablate(model, data, steps="1ba", algorithms=SMOOTH, **TRAIN)
pl.ablate(model, data, step="1ba", **TRAIN) | steps=? | pl.ablate(model, data, algorithms=SMOOTH, steps="1ba", **TRAIN)
of(listing, X, Y) | nn.ModuleList([...]) or nn.ModuleDict | of(nn.Sequential(*listing.layers), X, Y)
of(nn.Sequential(listing), X, Y) | model.0.layers | of(nn.Sequential(nn.ModuleList(listing.layers)[0]), X, Y)
pl.fit(recurrent, data * 2, **SETTINGS) | self.hidden = hidden.detach() | pl.fit(detaching, data * 2, **SETTINGS)
evaluated(metrics=["mae"]) | .abs(), 'mae') | evaluated(metrics=[pl.metrics.mean(gap, "mae")])
measured(pairs) | outputs.squeeze(-1) | measured(lambda outputs, batch: outputs.squeeze(-1) - batch[1])
pl.fit(model, list(dataset), **SETTINGS) | (dataset, batch_size=32) | pl.fit(model, DataLoader(dataset), **SETTINGS)
fit(algorithms=[unmeasured]) | fit(evaluators={"val": dataloader}) | evaluated(metrics=[pl.metrics.loss()])
pl.algorithms.ema(decay=0.99) | write smoothing=0.99 | pl.algorithms.ema(smoothing=0.99)
fit(eval_dataset=data) | evaluators={"val": dataloader} | fit(evaluators={"val": data})
fit(class_weight=[1, 2]) | torch.nn.CrossEntropyLoss(weight=tensor) | fit(loss=weighted(torch.ones(2)))
evaluated(metrics=["accuracy"]) | write pl.metrics.accuracy(). | evaluated(metrics=[pl.metrics.accuracy()])
pl.schedules.cosine("1dur", peak="1e-3") | write peak=0.001 | pl.schedules.cosine("1dur", peak=0.001)
fit(seed=NUMBERS[0]) | int(np.int64(3)) | fit(seed=int(NUMBERS[0]))
pl.optim.sgd(lr=NUMBERS[1]) | sgd(lr=float(np.float32(0.5))) | pl.optim.sgd(lr=float(NUMBERS[1]))
of(regressor, X, Y, summed, [mixup()]) | interpolate="loss" | of(regressor, X, Y, summed, [mixup(interpolate="loss")])
fit(algorithms=[transform(tuple)]) | whole_batch=True | fit(algorithms=[transform(tuple, whole_batch=True)])
fit(load_path=saved(state), optimizer=ADAMW) | exclude=['opt_state'] | afresh(optimizer=ADAMW)
pl.fit(partway, [(X, Y)], **SETTINGS) | smaller or fewer now | pl.fit(partway, data * 3, **SETTINGS)
pl.inspect(state, data, loss=cross_entropy) | and not the data | pl.inspect(state, data[0], loss=cross_entropy)
pl.fit(fit()) | pl.run(stream) | pl.run(fit())
pl.fit(fit(), data, **SETTINGS) | pl.run(stream) | pl.run(fit())
pl.from_composer(pickled(state), model) | fit takes as it is | fit()
fit(algorithms=[at_batch_end(torchs_gradient)]) | state.grads | fit(algorithms=[pl.algorithm("after_backward")(norm)])
"""


class Pairing(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs), inputs


class Silent(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        super().forward(inputs)


class First(nn.Module):
    def forward(self, several: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return several[0]


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(5, 5)], nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers[0](inputs))
        return result


class Recurrent(nn.Linear):
    hidden: Any = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.hidden = super().forward(inputs) + 0.5 * self.hidden
        result: torch.Tensor = self.hidden
        return result


class Detaching(Recurrent):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = super().forward(inputs)
        self.hidden = result.detach()
        return result


def of_last(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs, batch[-1])


class Own:
    def method(self, state: pl.State) -> pl.State:
        return state


class OfComposer:
    def match(self, event: object, state: object) -> bool:
        return True

    def apply(self, event: object, state: object, logger: object) -> None: ...


class OfLightning:
    def on_train_epoch_end(self, trainer: object, module: object) -> None: ...


class Nowhere:
    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


def right(state: Any, event: Any = Event.BATCH_END) -> Any:
    for _ in range(2):
        state = yield event, state.count_batch(samples=1)
    return state


def texts(state: Any) -> Any:
    return right(state, "batch_end")


def forgetful(state: Any) -> Any:
    while state.timestamp < "9ba":
        yield Event.BATCH_END, state.count_batch(samples=1)
    return state


def names() -> dict[str, Any]:
    """What the rows are written with: a model, data, a run of them, and its last State."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 5), torch.randint(2, (8,))
    data = [(x, y)]
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    sgd = pl.optim.sgd(lr=0.1)
    task = pl.Task(forward=lambda module, b: module(b["x"]), loss=lambda out, b: cross_entropy(out, b["y"]))
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": sgd, "max_duration": "1ep"}

    def fit(**changes: Any) -> pl.Stream:
        return pl.fit(model, data, **(settings | changes))

    def evaluated(**changes: Any) -> pl.Stream:
        return fit(evaluators={"val": pl.Evaluator(data, **changes)})

    def own(**methods: Any) -> pl.Stream:
        """With a logger of the user's own."""
        return fit(loggers=[type("Own", (pl.Logger,), {name: staticmethod(each) for name, each in methods.items()})()])

    def told(call: Any) -> pl.Stream:
        """With a callback that calls a logger."""
        return fit(callbacks=[type("Tells", (pl.Callback,), {"batch_end": lambda _, s, logger: call(logger, s)})()])

    ema, stopping = pl.algorithms.ema("1ba"), pl.algorithms.early_stopping("val/loss", best="keep")
    return {
        "torch": torch,
        "nn": nn,
        "pl": pl,
        "Event": Event,
        "cross_entropy": cross_entropy,
        "mse_loss": mse_loss,
        "entropy": entropy,
        "of": lambda module, x, y, loss=cross_entropy, algorithms=(): pl.fit(
            module, [(x, y)], **{**settings, "loss": loss, "algorithms": algorithms}
        ),
        "by": lambda module, batch, forward: pl.fit(
            module, [batch], loss=pl.Task(forward=forward, loss=of_last), optimizer=sgd, max_duration="1ep"
        ),
        "partial": functools.partial,
        "regressor": nn.Linear(5, 1),
        "pairing": Pairing(5, 2),
        "silent": Silent(5, 2),
        "first": First(),
        "images": nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 2)),
        "colours": nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 2)),
        "words": nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(20, 2)),
        "normed": nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)),
        "ragged": [(torch.ones(size), 0) for size in (3, 4)],
        "weighted": nn.CrossEntropyLoss,
        "product": nn.Bilinear(5, 5, 2),
        "GREY": torch.ones(8, 1, 4, 4),
        "backward_in": lambda outputs, y: ((loss := cross_entropy(outputs, y)).backward(), loss)[1],
        "NINES": torch.full((8, 5), 9),
        "overwriting": (model, nn.Sigmoid()),
        "padded": lambda data: DataLoader([(nn.functional.pad(x, (0, 5 - len(x))), y) for x, y in data], 2),
        "squeezed": lambda outputs, targets: mse_loss(outputs.squeeze(-1), targets),
        "tokens": lambda outputs, targets: cross_entropy(outputs.flatten(0, -2), targets.flatten()),
        "entropy_of_class_1": lambda outputs, targets: entropy(outputs[:, 1], targets.float()),
        "single": lambda outputs: outputs.sum(1),
        "gap": lambda outputs, batch: outputs[:, 0] - batch[1],
        "torchs_gradient": lambda state: state.params["0.weight"].grad.norm(),
        "norm": lambda state: (state.grads["0.weight"].norm(), state)[1],
        "listing": Listing(),
        "recurrent": Recurrent(5, 2),
        "detaching": Detaching(5, 2),
        "pairs": lambda outputs, batch: outputs - batch[1],
        "summed": lambda outputs, targets: (outputs.squeeze(-1) - targets).square().sum(),
        "measured": lambda function: pl.evaluate(
            nn.Linear(5, 1), pl.Evaluator(data, metrics=[pl.metrics.mean(function, "mse")])
        ),
        "unmeasured": pl.algorithms.early_stopping("val/loss"),
        "transform": pl.algorithms.transform,
        "NUMBERS": (numpy.int64(3), numpy.float32(0.5)),
        "ADAMW": pl.optim.adamw(lr=0.1),
        "saved": lambda state: (pl.save(state, "b.pl"), "b.pl")[1],
        "afresh": lambda **changes: pl.fit(
            pl.load("b.pl", model=model, exclude=["opt_state"]), data, **{**settings, **changes}
        ),
        "pickled": lambda state: (torch.save(state, "b.pt"), "b.pt")[1],
        "partway": next(
            s for _, s in pl.fit(model, data * 3, watch={"batch_end"}, **settings) if s.timestamp.batch > 1
        ),
        "mixup": pl.algorithms.mixup,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "X": x,
        "Y": y,
        "data": data,
        "model": model,
        "dataset": TensorDataset(x, y),
        "SETTINGS": settings,
        "SGD": sgd,
        "fit": fit,
        "evaluated": evaluated,
        "NOWHERE": Nowhere(),
        "NO_LOSS": {name: value for name, value in settings.items() if name != "loss"},
        "dicts": [{"x": x, "y": y}],
        "TASK": task,
        "tops": pl.FrozenDict(val=pl.FrozenDict(accuracy=0.5, accuracy_top5=1.0)),
        "SMOOTH": [pl.algorithms.label_smoothing(0.1)],
        "TRAIN": {"metric": "train/loss", **settings},
        "label_smoothing": pl.algorithms.label_smoothing(0.1),
        "OfComposer": OfComposer,
        "OfLightning": OfLightning,
        "same": lambda state: state,
        "at_batch_end": pl.algorithm("batch_end"),
        "Own": Own,
        "of_last": of_last,
        "add": lambda accumulator, outputs, batch: accumulator,
        "forgotten": lambda accumulator, outputs, batch: accumulator.append(1),
        "metric_of": lambda update: evaluated(metrics=[pl.Metric("m", list, update, len)]),
        "RADAM": torch.optim.RAdam,
        "DICT": torch.optim.SGD(model.parameters(), lr=0.1).state_dict(),
        "of_transformers": lambda data: pl.fit(
            model, data, loss=pl.Task.from_transformers(), optimizer=sgd, max_duration="1ep"
        ),
        "mixing": lambda algorithm: pl.fit(
            model, [{"x": x, "y": y}], loss=task, optimizer=sgd, max_duration="1ep", algorithms=[algorithm]
        ),
        "right": right,
        "texts": texts,
        "forgetful": forgetful,
        "own": own,
        "two": lambda metrics, state: None,
        "told": told,
        "logger": pl.loggers.InMemoryLogger(),
        "loss_of": lambda module: module[0].weight.sum(),
        "anew": pl.State.create(model),
        "nothing": lambda state: None,
        "unreduced": lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"),
        "state": pl.run(fit(evaluators={"val": data})),
        "stopped": pl.run(fit(algorithms=[stopping], evaluators={"val": data})),
        "average": pl.run(fit(algorithms=[ema])),
    }


def run(code: str, known: dict[str, Any]) -> None:
    kind = "exec" if " = " in code.partition("(")[0] else "eval"
    result = eval(compile(code, "<row>", kind), known)
    if isinstance(result, pl.Stream):
        for _ in result:
            pass


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return names()


@pytest.mark.parametrize("row", ROWS.strip().splitlines(), ids=lambda row: row.partition(" | ")[0])
def test_what_is_written_by_habit_is_answered_with_what_runs(
    row: str, known: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, words, right = row.split(" | ")
    with pytest.raises((pl.PureLoopError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)) as caught:
        run(wrong, known)
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert words in message, message
    assert " object at 0x" not in message, message
    run(right, known)
