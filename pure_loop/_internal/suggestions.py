"""Calls with arguments that a function doesn't have, or without those it needs: refused with what to write instead.

An attribute that a State does not have is answered in the same way: by where the value is under its own name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from pure_loop._internal.arguments import is_number
from pure_loop.errors import ArgumentTypeError

__all__ = [
    *("Elsewhere", "arguments_of_call", "nearest", "refuse_misfit", "state_hint", "state_hints", "teaching"),
]

P = ParamSpec("P")
T = TypeVar("T")

# How an argument is written.
_EXAMPLES = {
    "model_or_state": "model",
    "model": "model=module",
    "path": "path",
    "folder": "folder",
    "state": "state",
    "train_dataloader": "train_dataloader",
    "dataloader": "dataloader",
    "evaluators": 'evaluators={"val": dataloader}',
    "loss": "loss=torch.nn.functional.cross_entropy",
    "optimizer": "optimizer=pl.optim.adamw(lr=3e-4)",
    "max_duration": 'max_duration="3ep"',
}

# Other libraries' names, by the argument that stands for them here, and what to write; {} is the number given.
_LOADER = "DataLoader(dataset, batch_size={})"
_NAMES_ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    ("epochs num_epochs n_epochs max_epochs total_epochs", "max_duration", 'max_duration="{}ep"'),
    ("steps num_steps max_steps train_steps total_steps iterations", "max_duration", 'max_duration="{}ba"'),
    ("duration", "max_duration", 'max_duration="3ep"'),
    ("lr learning_rate", "optimizer", "optimizer=pl.optim.adamw(lr={})"),
    ("weight_decay betas", "optimizer", "optimizer=pl.optim.adamw(lr=3e-4, weight_decay=..., betas=...)"),
    ("momentum nesterov", "optimizer", "optimizer=pl.optim.sgd(lr=0.1, momentum=...)"),
    ("optim optimizers", "optimizer", "optimizer=pl.optim.adamw(lr=3e-4)"),
    (
        "scheduler schedulers lr_scheduler schedule lr_schedule",
        "optimizer",
        'optimizer=pl.optim.adamw(lr=pl.schedules.cosine("3ep", peak=3e-4))',
    ),
    ("model module net network state", "model_or_state", "it first and without a name: {call}"),
    (
        "data loader dataloader dataloaders dataset train_data train_loader train_dataset train_set",
        "train_dataloader",
        "it second and without a name: {call}",
    ),
    ("data loader dataset train_dataloader test_dataloader", "dataloader", "it second and without a name: {call}"),
    ("data loader dataloader dataset", "evaluators", 'it second and without a name: {call}, or as {{"val": data}}'),
    (
        "val val_data val_loader val_dataloader val_dataloaders valid_loader validation_data eval_dataloader "
        "eval_loader test_loader test_dataloader",
        "evaluators",
        'evaluators={{"val": dataloader}}',
    ),
    ("metrics metric", "evaluators", 'evaluators={{"val": pl.Evaluator(dataloader, metrics=[...])}}'),
    ("loss_fn loss_function criterion objective", "loss", "loss=torch.nn.functional.cross_entropy"),
    ("batch_size", "train_dataloader", f"train_dataloader={_LOADER}; microbatch_size= is how much of it goes at once"),
    ("batch_size", "evaluators", f'evaluators={{{{"val": {_LOADER}}}}}'),
    ("batch_size", "dataloader", _LOADER),
    (
        "shuffle num_workers collate_fn drop_last sampler",
        "train_dataloader",
        "it as an argument of the DataLoader: DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)",
    ),
    (
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum accumulate",
        "batches_per_step",
        "batches_per_step=4, and microbatch_size=8: how many samples of a batch go at once",
    ),
    (
        "auto_scale_batch_size auto_find_batch_size auto_microbatch device_train_microbatch_size",
        "microbatch_size",
        'microbatch_size="auto", halved until it fits',
    ),
    (
        "gradient_clip_val max_grad_norm grad_clip clip_grad_norm max_norm gradient_clipping clip",
        "clip_grad",
        "clip_grad=1.0",
    ),
    ("amp fp16 bf16 mixed_precision dtype autocast", "precision", 'precision="amp_bf16"'),
    ("fp8 float8", "precision", 'precision="amp_fp8"'),
    (
        "auto_lr_find find_lr",
        "optimizer",
        "optimizer=pl.optim.adamw(lr=...), with a rate that pl.lr_find(...) suggests",
    ),
    (
        "fast_dev_run num_sanity_val_steps sanity_check dry_run overfit_batches",
        "watch",
        "pl.rehearse(...), which tries the arguments of fit on one batch of each phase",
    ),
    ("profiler profile", "watch", "pl.profile(pl.{name}(...))"),
    ("accelerator gpus cuda", "device", 'device="cuda"'),
    ("strategy devices ddp fsdp distributed num_nodes", "parallel", 'parallel="replicate", under torchrun'),
    ("random_state random_seed manual_seed", "seed", "seed=0"),
    ("resume resume_from checkpoint checkpoint_path ckpt_path", "load_path", "load_path=path, or autoresume=folder"),
    ("checkpoint_dir save_dir save_folder output_dir", "autoresume", "autoresume=folder"),
    ("val_interval eval_every eval_steps val_check_interval", "eval_interval", 'eval_interval="1ep"'),
    ("verbose progress progress_bar", "model_or_state", "pl.progress(pl.{name}(...)) for a bar"),
    (
        "t t_max every period step_size total_iters num_training_steps total_steps t_0 duration max_duration",
        "time",
        'time="3ep"',
    ),
    ("times steps", "milestones", 'milestones=["10ep", "20ep"]'),
    ("num_warmup_steps warmup_steps t_warmup", "warmup", 'warmup="100ba"'),
    ("max_lr base_lr lr eta_max", "peak", "peak={}"),
    ("eta_min min_lr", "final", "final={}"),
    ("learning_rate", "lr", "lr={}"),
    ("beta1 beta2 b1 b2", "betas", "betas=(0.9, 0.999)"),
    ("params parameters model", "lr", "nothing of it: fit gives an optimizer the parameters"),
    ("events", "watch", "watch={{pl.Event.BATCH_END}}"),
    ("torch_compile compiled", "compile", "compile=True"),
    ("hooks", "callbacks", "callbacks=[...]"),
    ("module net network", "model", "model=module"),
    ("map_location", "device", 'device="cpu"'),
    # Of fit, where others have an argument and here is an algorithm, a callback or a logger.
    ("patience early_stopping early_stop", "algorithms", 'algorithms=[pl.algorithms.early_stopping("val/loss")]'),
    (
        "save_interval save_every save_every_n_steps checkpoint_interval checkpoint_every enable_checkpointing",
        "callbacks",
        'callbacks=[pl.callbacks.CheckpointSaver(folder, interval="1ep")]',
    ),
    ("logger log_dir logdir", "loggers", 'loggers=[pl.loggers.TensorBoardLogger("runs/first")]'),
    # Of callbacks, algorithms that compare a metric, and loggers.
    (
        "dirpath dir directory log_dir logdir save_dir save_folder root_dir output_dir checkpoint_dir default_root_dir",
        "folder",
        'folder="runs/first"',
    ),
    (
        "filename file file_name file_path filepath log_file save_path dirpath dir directory folder log_dir save_dir",
        "path",
        "path=..., the path of the file and not that of its folder",
    ),
    ("monitor monitored quantity", "metric", 'metric="val/loss", the label of an evaluator and a name'),
    (
        "save_top_k keep_top_k top_k save_best save_best_only",
        "keep_best",
        'keep_best={}, metric="val/loss", mode="min"',
    ),
    (
        "max_to_keep save_total_limit save_num_checkpoints_to_keep num_checkpoints_to_keep n_saved save_last",
        "keep_last",
        "keep_last={}",
    ),
    (
        "keep_last save_total_limit keep_best keep max_to_keep save_top_k",
        "autoresume",
        'autoresume=pl.callbacks.CheckpointSaver("runs/1", keep_last=2)',
    ),
    ("signals", "autoresume", 'autoresume=pl.callbacks.CheckpointSaver("runs/1", signals=["TERM", "USR1"])'),
    (
        "stop_before max_time time_limit walltime",
        "autoresume",
        'autoresume=pl.callbacks.CheckpointSaver("runs/1", stop_before="19h50m")',
    ),
    ("trained_only", "autoresume", 'autoresume=pl.callbacks.CheckpointSaver("runs/1", trained_only=True)'),
    ("save_weights_only model_only", "weights_only", "weights_only=True"),
    ("trainable_only adapters_only lora_only save_trainable_only", "trained_only", "trained_only=True"),
    ("max_time time_limit walltime max_runtime job_timeout", "stop_before", 'stop_before="19h50m"'),
    ("load_ignore_keys ignore_keys skip_keys exclude_keys load_exclude_algorithms", "exclude", 'exclude=["head.*"]'),
    ("key_mapping rename_keys mapping prefix", "rename", 'rename={{"backbone.": "encoder."}}'),
    ("auto_insert_metric_name name_format", "filename", 'filename="ep{{epoch}}-ba{{batch}}.safetensors"'),
    (
        "every_n_steps every_n_train_steps every_n_batches log_every_n_steps save_steps save_freq logging_steps",
        "interval",
        'interval="{}ba"',
    ),
    ("every_n_epochs save_every_n_epochs period epoch_interval", "interval", 'interval="{}ep"'),
    (
        "save_interval log_interval logging_interval batch_log_interval save_every log_every every frequency",
        "interval",
        'interval="100ba"',
    ),
    (
        "every_n_steps log_every_n_steps logging_steps log_interval logging_interval flush_interval flush_secs "
        "flush_logs_every_n_steps upload_interval interval",
        "flush",
        'flush="100ba"',
    ),
    ("name run_name display_name run_id id version", "flush", 'fit(..., run_name="first"), one name for all loggers'),
    ("project_name experiment_name", "project", 'project="digits"'),
    ("experiment_name project project_name", "experiment", 'experiment="digits"'),
    ("offline online", "mode", 'mode="offline"'),
    ("init_kwargs wandb_kwargs kwargs config settings experiment_kwargs", "options", "options={{...}}"),
    ("filter_names names metrics", "include", 'include=["train/*", "val/*"]'),
    ("uri tracking_url", "tracking_uri", 'tracking_uri="sqlite:///mlflow.db"'),
    ("delta min_improvement tolerance threshold", "min_delta", "min_delta={}"),
    ("restore_best_weights restore_best", "best", 'best="keep", and pl.algorithms.restored(state)'),
    ("min_lr eta_min", "min_scale", "min_scale=0.01, a factor of the learning rate"),
    ("window_size", "window", "window={}"),
)

# An argument that other libraries have at this place.
_TWICE = {"lr": "; fit gives an optimizer the parameters: pl.optim.adamw(lr=3e-4)"}


def teaching(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose errors about the names and the number of its arguments say what to write."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_misfit(function, args, kwargs)
        return function(*args, **kwargs)

    return called


def refuse_misfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """
    Raises:
        ArgumentTypeError: the function has no such arguments, or lacks one.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        place, name = _place(function), function.__name__
        sentences = _said(place, name, signature.parameters, args, kwargs) or [f"{name}: {error}."]
        raise ArgumentTypeError(" ".join(sentences)) from None


def arguments_of_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included.

    Raises:
        ArgumentTypeError: the function has no such arguments, or lacks one.
    """
    refuse_misfit(function, args, kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# Packages whose members are written with the package's name; those of others are pl.NAME.
_NAMED_PACKAGES = ("algorithms", "callbacks", "loggers", "metrics", "optim", "schedules")


def _place(function: Callable[..., Any]) -> str:
    """What is written before the function's name."""
    package, _, rest = function.__module__.partition(".")
    if package != "pure_loop":
        return ""
    return f"pl.{rest.partition('.')[0]}." if rest.partition(".")[0] in _NAMED_PACKAGES else "pl."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if there is one."""
    import difflib  # only on the way to an error

    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return near[0] if near else None


def _said(
    place: str,
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[str]:
    by_place = [
        parameter.name for parameter in parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    call = f"{place}{name}({', '.join(map(_example, by_place))}, ...)"
    if len(args) > len(by_place):
        return [
            f"{name} takes {_how_many(by_place)}, and was given {len(args)}"
            + (f": write the names of the others, {following}." if (following := _named_next(parameters)) else ".")
        ]
    sentences = [
        f"{name} was given {item} twice, at its place and by its name: leave one of them out{_TWICE.get(item, '')}."
        for item in by_place[: len(args)]
        if item in kwargs
    ]
    value = {*by_place[: len(args)], *kwargs}
    for unknown in [item for item in kwargs if item not in parameters]:
        text, stands_for = _advice(name, unknown, kwargs[unknown], parameters, call)
        sentences.append(f"{name} has no argument {unknown!r}{text}")
        value.add(stands_for)
    lacking = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.name not in value
    ]
    if lacking:
        whole = [*by_place, *(item for item in lacking if item not in by_place)]
        sentences.append(
            f"{name} {'also ' if sentences else ''}needs {' and '.join(lacking)}: "
            f"{place}{name}({', '.join(map(_example, whole))}{', ...' if name == 'fit' else ''})."
        )
    return sentences


def _how_many(by_place: list[str]) -> str:
    if not by_place:
        return "no argument without its name"
    one = len(by_place) == 1
    names = "its name" if one else "their names"
    return f"{len(by_place)} argument{'' if one else 's'} without {names}, {' and '.join(by_place)}"


def _named_next(parameters: Mapping[str, inspect.Parameter]) -> str:
    keywords = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    return ", ".join(map(_example, keywords[:3]))


def _example(name: str) -> str:
    return _EXAMPLES.get(name, f"{name}=...")


def _advice(
    name: str, unknown: str, value: Any, parameters: Mapping[str, inspect.Parameter], call: str
) -> tuple[str, str]:
    """What to write for an argument that there is not, and for which one it stands; "" for none."""
    number = value if is_number(value) else "..."
    for names, parameter, text in _NAMES_ELSEWHERE:
        if unknown.lower() in names.split() and parameter in parameters:
            return f": write {text.format(number, name=name, call=call)}.", parameter
    near = nearest(unknown, parameters)
    if near is not None:
        return f"; did you mean {near}=?", near
    return f"; it has {', '.join(parameters)}.", ""


# Where the values are that other libraries have under these names.
_STATE_PLACES: tuple[tuple[str, str], ...] = (
    ("gradients gradient grad", "gradients are state.grads, by parameter name"),
    (
        "lr learning_rate scheduler lr_scheduler schedule",
        "the learning rate is the optimizer's: optimizer.lr(state.timestamp)",
    ),
    (
        "optimizer optimizers optimizer_state",
        "the optimizer state is state.opt_state; the optimizer itself is the argument of fit",
    ),
    ("step steps global_step batch_idx", "finished batches are state.timestamp.batch"),
    ("epochs current_epoch", "finished epochs are state.timestamp.epoch"),
    ("weights parameters state_dict", "parameters are state.params, by name; state.module() is a module with them"),
    ("named_buffers", "buffers are state.buffers, by name"),
    (
        "net forward train eval",
        "state.module() is a plain module with copies of the parameters; state.module(training=False) is in eval mode",
    ),
    (
        "accuracy val_loss eval_loss metric",
        'metrics are state.metrics[label][name], such as state.metrics["val"]["accuracy"]',
    ),
    ("inputs targets labels", "the batch is state.batch, and the part of it that is computed now state.microbatch"),
    ("predictions output logits", "what the forward returned is state.outputs"),
    ("memory algorithms", "what an algorithm keeps is state.algorithm_state[name]"),
    ("rng generator", "random numbers come from pl.random.generator(state.seed, name, state.timestamp.batch)"),
    ("scaler grad_scaler", "the loss scale is state.loss_scale"),
    ("rank world_size", "ranks are pl.distributed.rank() and pl.distributed.world_size()"),
)


def state_hints(fields: Iterable[str], counted: Iterable[str]) -> dict[str, str]:
    """Where to look, by name, for names that are no fields of a State; ``counted`` are those of its timestamp."""
    result = {name: f"it is state.timestamp.{name}" for name in counted}
    result |= {name: place for names, place in _STATE_PLACES for name in names.split()}
    for name in fields:
        result.pop(name, None)
    return result


def state_hint(name: str, fields: Iterable[str], counted: Iterable[str]) -> str:
    """What to write for a name that is no field of a State, in parentheses; "" where nothing is known."""
    fields = list(fields)
    place = state_hints(fields, counted).get(name)
    if place is None:
        near = nearest(name, fields)
        place = None if near is None else f"did you mean {near!r}?"
    return "" if place is None else f" ({place})"


class Elsewhere:
    """An attribute that raises: the error says where the value is.

    A ``__getattr__`` would say so of all names, and make every read of a State take several times as long.
    """

    __slots__ = ("_name", "_place")

    def __init__(self, name: str, place: str) -> None:
        self._name, self._place = name, place

    def __get__(self, instance: object, owner: type) -> NoReturn:
        name = self._name
        raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r}: {self._place}.", name=name)

    def __repr__(self) -> str:
        return f"<not here: {self._place}>"
