"""Frozen parameters that a file leaves out: known by digests, and taken from the model when the file is loaded.

A run that trains few parameters of a large model (adapters, a head) saves those alone. What is frozen is the same in
all of its checkpoints, and in the weights that it started with, so a file has a digest of each frozen tensor, and
loading compares them with the model that is passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import are_sharded, full_tensor
from pure_loop.checkpoint.container import CODES, DTYPES, is_shape
from pure_loop.checkpoint.digests import FROZEN_BYTES, digest_of_frozen
from pure_loop.checkpoint.parsing import shortened
from pure_loop.checkpoint.tree import Writer
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.state import State

__all__ = ["Base", "BaseTensor", "read_base", "refuse_no_base", "take_out_base", "verified_base"]

_PREFIX = "params."


@attrs.frozen
class BaseTensor:
    """A frozen parameter that a file leaves out.

    Attributes:
        dtype, shape: as it would lie in the file.
        digest: BLAKE2b-128 of its dtype, shape and bytes, in hexadecimal.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    def described(self) -> list[Any]:
        return [CODES[self.dtype], list(self.shape), self.digest]


Base = Mapping[str, BaseTensor]
"""Frozen parameters by the names that they would have in the file, ``params.<name>``."""


def refuse_no_base(state: State) -> None:
    """
    Raises:
        ArgumentError: nothing can be left out of a file of this State.
    """
    model = type(state.model.skeleton).__name__
    if are_sharded(state.params):
        raise ArgumentError(
            "trained_only=True: a sharded State is saved whole, because the digest of a frozen parameter needs all of "
            "its shards: leave trained_only out."
        )
    if len(state.model.trainable) == len(state.params):
        raise ArgumentError(
            f"trained_only=True leaves out frozen parameters, and all {len(state.params)} parameters of {model} are "
            "trained: freeze some, model.backbone.requires_grad_(False), or leave trained_only out."
        )


def take_out_base(state: State, described: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, BaseTensor]:
    """Take the frozen parameters out of the tensors to be written.

    Args:
        state: what is written.
        described: its parameters as JSON, by name.
        tensors: by the names that the JSON refers to.
    """
    trained = {described[name]["tensor"] for name in state.model.trainable}
    result: dict[str, BaseTensor] = {}
    for name, tensor in state.params.items():
        key = described[name]["tensor"]
        if key in trained or key in result:
            continue
        plain = tensors.pop(key)
        result[key] = BaseTensor(plain.dtype, tuple(plain.shape), digest_of_frozen(tensor, plain))
    return result


def read_base(value: Any) -> dict[str, BaseTensor]:
    """
    Raises:
        ValueError: the JSON describes no tensors.
    """
    result = {}
    for key, described in value.items():
        code, shape, digest = described
        if not (key.startswith(_PREFIX) and isinstance(code, str) and code in DTYPES and is_shape(shape)):
            raise ValueError(f"its frozen parameter {shortened(key)} is {shortened(described)}")
        if not (isinstance(digest, str) and len(digest) == 2 * FROZEN_BYTES):
            raise ValueError(f"the digest of its frozen parameter {shortened(key)} is {shortened(digest)}")
        result[key] = BaseTensor(DTYPES[code], tuple(shape), digest)
    return result


def verified_base(base: Base, state: State, path: object) -> dict[str, tuple[Tensor, Tensor]]:
    """The frozen parameters of a file, from the State of the model that was passed.

    If the State is sharded, all ranks call it together.

    Returns:
        by the names of ``base``: the parameter, and the tensor that the file would have.

    Raises:
        ResumeError: the model has other ones; names the first.
    """
    result, differing = {}, []
    model = type(state.model.skeleton).__name__
    for key, saved in base.items():
        name = key.removeprefix(_PREFIX)
        if name not in state.params:
            raise ResumeError(
                f"{path} holds the trained parameters alone, and its frozen ones come from the model: {name!r} is not "
                f"a parameter of the {model} given. Build the model as it was built then."
            )
        whole = full_tensor(state.params[name])
        writer = Writer(whole.device)
        writer.write(whole, ("params", name))
        plain = writer.tensors[key]
        if (plain.dtype, tuple(plain.shape)) != (saved.dtype, saved.shape) or digest_of_frozen(
            whole, plain
        ) != saved.digest:
            differing.append(name)
        result[key] = whole, plain
    if differing:
        raise ResumeError(
            f"{path} holds the trained parameters alone, and its frozen ones come from the model: params"
            f"[{differing[0]!r}] of the {model} given is not what it was when the file was saved "
            f"({len(differing)} of {len(base)} frozen parameters differ). Load the same base into the model first. "
            "For the trained parameters on another base: "
            "pl.load(path, model=model, weights_only=True, strict=False)."
        )
    return result
