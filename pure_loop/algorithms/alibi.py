"""ALiBi: attention with linear biases, in the place of position embeddings.

To the score of a query at position i and a key at position j the head with the number h of H, counted from 1, adds::

    - m_h |i - j|,   m_h = 2^(-8 h / H)            https://arxiv.org/abs/2108.12409

Where H is no power of two, the slopes are those of the next smaller one, and then every second one of twice as many.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pure_loop._internal.arguments import check_number
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import copied, surgery
from pure_loop.errors import ArgumentError, ModelError
from pure_loop.ranges import AtLeast, checked

__all__ = ["alibi", "alibi_bias", "alibi_slopes", "apply_alibi"]

SERVES = "attention"

_MULTI_HEAD: Any = functional.multi_head_attention_forward
_PARAMETERS = inspect.signature(_MULTI_HEAD)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, (``heads``,), float32.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    power = 2 ** int(math.log2(heads))
    slopes = torch.exp2(-8.0 / power * torch.arange(1, power + 1, device=device))
    if power == heads:
        return slopes
    between = torch.exp2(-4.0 / power * torch.arange(1, 2 * (heads - power), 2, device=device))
    return torch.cat([slopes, between])


def alibi_bias(slopes: Tensor, queries: int, keys: int, *, causal: bool = False) -> Tensor:
    """What is added to the scores of attention.

    Args:
        slopes: of the heads, (H,).
        queries: L, the last positions of the keys.
        keys: S.
        causal: hide keys that come after a query, by a bias of minus infinity.

    Returns:
        (H, L, S), of the dtype of ``slopes``.

    >>> alibi_bias(torch.tensor([0.5]), 2, 2)
    tensor([[[-0.0000, -0.5000],
             [-0.5000, -0.0000]]])
    """
    place = torch.arange(keys, device=slopes.device)
    distance = place - (torch.arange(queries, device=slopes.device) + keys - queries).unsqueeze(1)
    bias = -slopes[:, None, None] * distance.abs().to(slopes.dtype)
    return bias.masked_fill(distance > 0, -math.inf) if causal else bias


class _Attending(TorchFunctionMode):
    """Adds the biases to each call of torch's attention."""

    def __init__(self, slopes: tuple[float, ...] | None, causal: bool | None, heads: int | None) -> None:
        super().__init__()
        self.slopes, self.causal, self.heads, self.calls = slopes, causal, heads, 0

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            self.calls += 1
            return self._scaled_dot_product(*args, **kwargs)
        if function is _MULTI_HEAD:
            call = _PARAMETERS.bind(*args, **kwargs)
            if call.arguments["query"] is call.arguments["key"]:  # not the attention of one sequence to another
                self.calls += 1
                return self._multi_head(call)
        return function(*args, **kwargs)

    def _bias(self, heads: int, queries: int, keys: int, of: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
        if self.heads is not None and self.heads != heads:
            raise ModelError(f"alibi: heads={self.heads}, and an attention of the model has {heads} heads.")
        if self.slopes is not None and len(self.slopes) != heads:
            raise ModelError(
                f"alibi: there are {len(self.slopes)} slopes, and an attention of the model has {heads} heads: give a "
                "slope for each head, or leave slopes out."
            )
        if self.slopes is None:
            slopes = alibi_slopes(heads, of.device)
        else:  # made on the device: a copy would wait for it
            slopes = torch.stack([torch.full((), number, device=of.device) for number in self.slopes])
        bias = alibi_bias(slopes, queries, keys, causal=causal if self.causal is None else self.causal)
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else bias + mask
        return bias.to(of.dtype)

    def _scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if query.ndim < 4:
            raise ModelError(
                f"alibi: an attention of the model has queries of shape {tuple(query.shape)}, and (n, heads, length, "
                "size) is needed, as slopes are those of heads."
            )
        heads, queries = query.shape[-3:-1]
        bias = self._bias(heads, queries, key.shape[-2], query, is_causal, attn_mask)
        return functional.scaled_dot_product_attention(query, key, value, bias, dropout_p, False, **options)

    def _multi_head(self, call: inspect.BoundArguments) -> object:
        call.apply_defaults()
        arguments = call.arguments
        query, mask, heads = arguments["query"], arguments["attn_mask"], arguments["num_heads"]
        queries, keys = query.shape[0], arguments["key"].shape[0]
        if mask is not None:
            # Of torch's own masks True hides, and it is False there in those of scaled_dot_product_attention.
            mask = ~mask if mask.dtype is torch.bool else mask
            mask = mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask
        bias = self._bias(heads, queries, keys, query, arguments["is_causal"] and mask is None, mask)
        samples = query.shape[1] if query.ndim == 3 else 1
        arguments["attn_mask"] = bias.expand(samples, heads, queries, keys).reshape(samples * heads, queries, keys)
        arguments["is_causal"] = False
        padding = arguments["key_padding_mask"]
        if padding is not None and padding.dtype is torch.bool:  # of one dtype with the biases
            arguments["key_padding_mask"] = torch.zeros_like(padding, dtype=bias.dtype).masked_fill(padding, -math.inf)
        return _MULTI_HEAD(*call.args, **call.kwargs)


_active = threading.local()


class _Enter:
    """The hook before the forward of the model. An object of a module, so that it can be pickled."""

    def __init__(self, slopes: tuple[float, ...] | None, causal: bool | None, heads: int | None) -> None:
        self.slopes, self.causal, self.heads = slopes, causal, heads

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        modes: list[_Attending | None] = getattr(_active, "modes", [])
        # Of the model itself; or of a layer that is called again in a backward, which activation checkpointing does.
        mode = None if modes else _Attending(self.slopes, self.causal, self.heads)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]
        _active.modes = [*modes, mode]


class _Leave:
    """The hook after the forward, which is called where the forward raises, too."""

    def __init__(self, checks: bool) -> None:
        self.checks = checks

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        *_active.modes, mode = _active.modes
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if self.checks and output is not None and not mode.calls:
            raise ModelError(
                f"alibi: the forward of {type(module).__name__} called neither scaled_dot_product_attention nor "
                "nn.MultiheadAttention, so there is no attention to add biases to. Models of transformers call it with "
                'attn_implementation="sdpa".'
            )


@checked
def apply_alibi(
    module: nn.Module,
    max_length: Annotated[int, AtLeast(1)],
    *,
    position_embeddings: Sequence[str] = (),
    heads: Annotated[int | None, AtLeast(1, typical=())] = None,
    causal: bool | None = None,
    slopes: Sequence[float] | None = None,
) -> nn.Module:
    """A copy of a module with linear biases in its attention; the module stays as it was.

    Each call of ``scaled_dot_product_attention`` in its forward gets them, and each of ``nn.MultiheadAttention`` with
    queries and keys of one sequence, whatever the model is, with activation checkpointing of its layers, too. Names
    and values of parameters stay, except of position embeddings.

    Args:
        max_length: the length of the longest sequence that the model is to take.
        position_embeddings: the dotted names of the ``nn.Embedding`` of positions, or of parameters, (positions, size)
            or (1, positions, size): they become 0, are not trained, and are extended to ``max_length``.
        heads: how many heads each attention has to have; None: any number.
        causal: True: hide the keys after a query in each attention; False: in none; None: as the model does.
        slopes: of the heads; None: those of the paper, for the heads of each attention.

    Raises:
        ModelError: a name that is no embedding or parameter, or it is applied already; in a forward: there was no
            attention, or one of another number of heads.
        ArgumentError: ``max_length`` is less than there are positions, or a slope is no finite number.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> torch.allclose(apply_alibi(layer, 5)(x), layer(x))
    False
    """
    clone = copied(module, "apply_alibi")
    if hasattr(clone, "alibi_heads"):
        raise ModelError(f"alibi: the attention of {type(module).__name__} has linear biases already.")
    for name in position_embeddings:
        _zero(clone, name, max_length)
    chosen = None if slopes is None else tuple(map(_slope, slopes))
    vars(clone)["alibi_heads"] = heads
    for layer in clone.modules():
        layer.register_forward_pre_hook(_Enter(chosen, causal, heads), with_kwargs=True)
        layer.register_forward_hook(_Leave(checks=layer is clone), always_call=True)
    return clone


def _slope(number: object) -> float:
    return float(check_number("slopes", number, where="alibi", example="alibi(1024, slopes=[0.5, 0.25])"))


def _zero(module: nn.Module, name: str, max_length: int) -> None:
    """Position embeddings of 0 for ``max_length`` positions, which are not trained."""
    parent, _, last = name.rpartition(".")
    try:
        target: Any = getattr(module.get_submodule(parent), last)
    except AttributeError:
        target = None
    if isinstance(target, nn.Embedding):
        holder, key, weight = target, "weight", target.weight
    elif isinstance(target, nn.Parameter) and target.ndim in (2, 3):
        holder, key, weight = cast("Any", module.get_submodule(parent)), last, target
    else:
        embeddings = [path for path, layer in module.named_modules() if isinstance(layer, nn.Embedding)]
        raise ModelError(
            f"alibi: position_embeddings names {name!r}, which is no nn.Embedding and no parameter of "
            f"{type(module).__name__}; its embeddings are {', '.join(map(repr, embeddings)) or 'none'}."
        )
    positions = weight.shape[-2]
    if max_length < positions:
        raise ArgumentError(
            f"alibi: max_length={max_length} is less than the {positions} positions of {name!r}, on which the model "
            f"was trained: write max_length={positions} or more."
        )
    shape = (*weight.shape[:-2], max_length, weight.shape[-1])
    zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    setattr(holder, key, nn.Parameter(zeros, requires_grad=False))
    if isinstance(target, nn.Embedding):
        target.num_embeddings = max_length


@checked
def alibi(
    max_length: Annotated[int, AtLeast(1)],
    *,
    position_embeddings: Sequence[str] = (),
    heads: Annotated[int | None, AtLeast(1, typical=())] = None,
    causal: bool | None = None,
    slopes: Sequence[float] | None = None,
    name: str = "alibi",
) -> Algorithm:
    """Linear biases in the attention of the model, put there at INIT.

    Trained on short sequences, the model takes longer ones: with ``sequence_length_warmup``, or in evaluation. The
    module given to ``fit`` stays as it was; :func:`apply_alibi` is the same for a module of your own.

    Args:
        max_length, position_embeddings, heads, causal, slopes: as in :func:`apply_alibi`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range; in training, at INIT: ``max_length`` is less than there are positions.
        ArgumentTypeError: a setting of another type.
        ModelError: in training: a name that is no embedding, or a forward without attention.

    >>> import pure_loop as pl
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> data = [(torch.randn(2, 5, 8), torch.randn(2, 5, 8))]
    >>> state = pl.run(pl.fit(layer, data, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[alibi(5)]))
    >>> state.timestamp.batch
    1
    """
    if slopes is not None:
        list(map(_slope, slopes))
    return surgery(apply_alibi, **locals())
