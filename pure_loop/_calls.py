"""Calls with arguments that a function doesn't have, or without those it needs: refused with what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from pure_loop.errors import ArgumentTypeError

__all__ = ["nearest", "refuse_misfit", "teaching"]

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
        "microbatch_size",
        "microbatch_size=8: how many samples of a batch go at once",
    ),
    (
        "gradient_clip_val max_grad_norm grad_clip clip_grad_norm max_norm gradient_clipping clip",
        "clip_grad",
        "clip_grad=1.0",
    ),
    ("amp fp16 bf16 mixed_precision dtype autocast", "precision", 'precision="amp_bf16"'),
    ("accelerator gpus cuda", "device", 'device="cuda"'),
    ("strategy devices ddp fsdp distributed num_nodes", "parallel", 'parallel="replicate", under torchrun'),
    ("random_state random_seed manual_seed", "seed", "seed=0"),
    ("resume resume_from checkpoint checkpoint_path ckpt_path", "load_path", "load_path=path, or autoresume=folder"),
    ("checkpoint_dir save_dir save_folder output_dir", "autoresume", "autoresume=folder"),
    ("val_interval eval_every eval_steps val_check_interval", "eval_interval", 'eval_interval="1ep"'),
    ("verbose progress progress_bar", "model_or_state", "pl.progress(pl.{name}(...)) for a bar"),
    ("learning_rate", "lr", "lr={}"),
    ("beta1 beta2 b1 b2", "betas", "betas=(0.9, 0.999)"),
    ("params parameters model", "lr", "nothing of it: fit gives an optimizer the parameters"),
    ("events", "watch", "watch={{pl.Event.BATCH_END}}"),
    ("torch_compile compiled", "compile", "compile=True"),
    ("hooks", "callbacks", "callbacks=[...]"),
    ("module net network", "model", "model=module"),
    ("map_location", "device", 'device="cpu"'),
)

# What is given at the place of an argument by who knows another library.
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
        said = _said(function.__name__, signature.parameters, args, kwargs) or [f"{function.__name__}: {error}."]
        raise ArgumentTypeError(" ".join(said)) from None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if there is one."""
    import difflib  # only on the way to an error

    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return near[0] if near else None


def _said(
    name: str, parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    by_place = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    call = f"pl.{name}({', '.join(map(_example, by_place))}, ...)"
    if len(args) > len(by_place):
        return [
            f"{name} takes {len(by_place)} arguments without their names, {' and '.join(by_place)}, and was given "
            f"{len(args)}: write the names of the others, {_named_next(parameters)}."
        ]
    said = [
        f"{name} was given {each} twice, at its place and by its name: leave one of them out{_TWICE.get(each, '')}."
        for each in by_place[: len(args)]
        if each in kwargs
    ]
    given = {*by_place[: len(args)], *kwargs}
    for unknown in [each for each in kwargs if each not in parameters]:
        text, stands_for = _advice(name, unknown, kwargs[unknown], parameters, call)
        said.append(f"{name} has no argument {unknown!r}{text}")
        given.add(stands_for)
    lacking = [each.name for each in parameters.values() if each.default is each.empty and each.name not in given]
    if lacking:
        whole = [*by_place, *(each for each in lacking if each not in by_place)]
        said.append(
            f"{name} {'also ' if said else ''}needs {' and '.join(lacking)}: "
            f"pl.{name}({', '.join(map(_example, whole))}{', ...' if name == 'fit' else ''})."
        )
    return said


def _named_next(parameters: Mapping[str, inspect.Parameter]) -> str:
    keywords = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
    return ", ".join(map(_example, keywords[:3]))


def _example(name: str) -> str:
    return _EXAMPLES.get(name, f"{name}=...")


def _advice(
    name: str, unknown: str, value: Any, parameters: Mapping[str, inspect.Parameter], call: str
) -> tuple[str, str]:
    """What to write for an argument that there is not, and for which one it stands; "" for none."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else "..."
    for names, parameter, text in _NAMES_ELSEWHERE:
        if unknown.lower() in names.split() and parameter in parameters:
            return f": write {text.format(number, name=name, call=call)}.", parameter
    near = nearest(unknown, parameters)
    if near is not None:
        return f"; did you mean {near}=?", near
    return f"; it has {', '.join(parameters)}.", ""
