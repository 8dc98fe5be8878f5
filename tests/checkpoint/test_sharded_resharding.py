"""Planning and resharding, in this process: any shapes, dtypes, and numbers of ranks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pure_loop as pl
from pure_loop._internal.tree_ops import is_sharded, local_tensor
from pure_loop.checkpoint import container, sharded
from pure_loop.checkpoint.sharded import ShardedCheckpoint, write
from pure_loop.frozendict import FrozenDict
from pure_loop.testing.ranks import simulate
from tests.support.sharding import Here, in_parts
from tests.support.streams import leaves
from tests.support.tiers import examples


class _Some(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))


# The format lacks two of them: one of a byte, and one of several.
DTYPES = (torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool, torch.float8_e4m3fn)
DTYPES += (torch.float8_e4m3fnuz,)


@st.composite
def states(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def numbers(shape, dtype):
        return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)

    def tensor(shape, dtype):
        if dtype is torch.bool:
            return numbers(shape, dtype)[..., 0] > 127
        return numbers(shape, dtype).view(dtype)[..., 0]

    module = _Some(shapes)
    params = FrozenDict((name, tensor(each.shape, each.dtype)) for name, each in module.named_parameters())
    memory = FrozenDict(
        (name, tensor(each.shape, draw(st.sampled_from(DTYPES)))) for name, each in module.named_parameters()
    )
    plain = FrozenDict(
        count=torch.tensor(3), table=tensor((2, 3), draw(st.sampled_from(DTYPES))), empty=torch.ones(0, 2)
    )
    return pl.State.create(module).replace(params=params, opt_state=FrozenDict(memory=memory), metrics={"plain": plain})


@pytest.mark.slow  # real ranks of several numbers
@given(states(), st.integers(1, 4), st.integers(1, 4), st.booleans())
@examples(12, 500)
def test_any_state_of_n_ranks_is_the_same_on_m(tmp_path_factory, state, n, m, replicated):
    path = str(tmp_path_factory.mktemp("folder") / "a.sharded")
    shape = (2, n) if replicated else (n,)

    def mesh(shape):
        if len(shape) == 1:
            return DeviceMesh.from_group(dist.group.WORLD, "cpu")
        # Its groups are never used.
        ranks = torch.arange(shape[0] * shape[1]).reshape(shape)
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())

    def save(rank):
        write(Here(table), in_parts(state, mesh(shape)), path)

    def load(rank):
        template = in_parts(pl.State.create(state.model.module(state.params, {})), mesh((m,)))
        with patch.object(sharded, "_fill_from", wraps=sharded._fill_from) as reading:
            found = ShardedCheckpoint.read(path).into(template)
        if n == m and not replicated:
            read = {call.args[0].name.partition("-")[2] for call in reading.call_args_list}
            assert read <= {f"{rank}-of-{n}.safetensors", "whole.safetensors"}
        wanted = in_parts(state, mesh((m,)))
        assert all(map(is_sharded, found.params.values()))
        given, expected = leaves(found), leaves(wanted)
        assert given.keys() == expected.keys()
        for name, leaf in expected.items():
            assert is_sharded(given[name]) is is_sharded(leaf), name
            a, b = local_tensor(given[name]), local_tensor(leaf)
            if isinstance(b, torch.Tensor):
                assert a.dtype is b.dtype
                assert a.shape == b.shape, name
                assert container.raw(a).equal(container.raw(b)), name

    table = {}
    simulate(save, shape[0] * n if replicated else n)
    simulate(load, m)
    alone = pl.load(path, model=state.model.module(state.params, {}))
    for name, leaf in leaves(state).items():
        if isinstance(leaf, torch.Tensor):
            assert container.raw(leaves(alone)[name].contiguous()).equal(container.raw(leaf.contiguous())), name
