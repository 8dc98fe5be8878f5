"""Compiled steps are what they are without each private name of torch that compiling uses, and without all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx import Graph, GraphModule

from pure_loop import Event
from pure_loop.compile import _torch, interpreted, operations
from tests.support import problem
from tests.support.compiling import FIVE, mlp, same, several

PARTS = {Event.AFTER_LOSS, Event.BATCH_END}
ENTRY = "torch._inductor.compile_fx:compile_fx_inner"


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """From here on torch lacks these names, as far as pure_loop sees."""
    real = _torch._attribute
    cached = (_torch._find, _torch._has_inductor, _torch.schema_of)

    def hide(*names: str) -> None:
        def attribute(path: str) -> Any:
            if path in names:
                raise AttributeError(path)
            return real(path)

        for function in cached:
            function.cache_clear()
        monkeypatch.setattr(_torch, "missing", {})
        monkeypatch.setattr(_torch, "_attribute", attribute)

    yield hide
    for function in cached:
        function.cache_clear()


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``torch.compile`` traces is run as it is: the compiler behind it takes seconds for each graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def assert_as_eager(**settings: Any) -> None:
    same({"model": mlp, "data": FIVE[:2], "max_duration": "2ba"} | settings, 1e-5)


def dotted(*names: str) -> set[str]:
    return {name.replace(":", ".") for name in names}


@pytest.mark.usefixtures("no_code")
def test_a_step_is_traced_and_called_without_all(hide: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    assert not _torch.look_up_all()
    hide(*_torch.NAMES)
    with interpreted():
        assert_as_eager(algorithms=several())
        assert_as_eager(watch=PARTS)
    assert _torch.missing.keys() >= dotted(ENTRY, "torch._dispatch.python.enable_python_dispatcher")
    assert_as_eager(model=problem.mlp)
    assert f"has no {dotted(ENTRY).pop()}: graphs are compiled by torch.compile" in caplog.text
    assert _torch.look_up_all().keys() == dotted(*_torch.NAMES)


@pytest.mark.slow
def test_steps_are_compiled_without_all_and_by_a_later_torch(hide: Callable[..., None]) -> None:
    """By the compiler itself, entered by ``torch.compile``, and by its own entry with a setting that is gone."""
    hide(*_torch.NAMES)
    assert_as_eager()
    hide()
    with patch.dict(_torch._SETTINGS, {"a_setting_of_the_past": False}):
        assert_as_eager()
    (said,) = _torch.missing
    assert "a_setting_of_the_past" in said


@pytest.mark.usefixtures("no_code")
def test_a_graph_writes_after_all_that_it_reads() -> None:
    """Two inputs change places, and what is given is neither of them."""
    graph = Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    kept = graph.call_function(torch.ops.aten.lift_fresh_copy.default, (one,))
    for target, value in ((one, other), (other, kept)):
        graph.call_function(torch.ops.aten.copy_.default, (target, value))
    graph.output([kept, one, graph.call_function(torch.ops.aten.add.Tensor, (one, 1))])
    a, b = torch.zeros(2, requires_grad=True), torch.ones(2)
    given = [a, b]
    results = _torch._ByTorchCompile(GraphModule({}, graph))(given)
    assert not given
    assert [each.tolist() for each in (a, b, *results)] == [[1, 1], [0, 0], [0, 0], [0, 0], [1, 1]]
    assert len({each.data_ptr() for each in (a, b, *results)}) == 5


def test_batch_norm_of_a_gpu_is_that_of_the_graph() -> None:
    images, grad = (torch.randn(4, 3, 2, 2, generator=problem.noise(i), requires_grad=i == 0) for i in range(2))
    weight, bias = torch.rand(3, generator=problem.noise(), requires_grad=True), torch.zeros(3, requires_grad=True)
    known, ours = ((torch.zeros(3), torch.ones(3)) for _ in range(2))
    wanted = torch.nn.functional.batch_norm(images, *known, weight, bias, True, 0.1, 1e-5)
    table, aten = operations.declared(), torch.ops.aten
    with torch.no_grad():
        out, *saved, reserved = table[aten.cudnn_batch_norm.default](images, weight, bias, *ours, True, 0.1, 1e-5)
        back = table[aten.cudnn_batch_norm_backward.default]
        gradients = back(images, grad, weight, *ours, *saved, 1e-5, reserved)
    torch.testing.assert_close((out, *ours), (wanted, *known))
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, (images, weight, bias), grad))


def test_what_a_name_says_of_an_operation() -> None:
    for name in ("add_", "add", "view", "_foreach_add_", "_scaled_dot_product_flash_attention_for_cpu"):
        packet = getattr(torch.ops.aten, name)
        target = getattr(packet, packet.overloads()[0])
        known, by_name = _torch.schema_of(target), _torch._schema_by_name(target)
        assert known is not None
        assert (by_name.writes, by_name.is_view) == (known.writes, known.is_view)
        if "dropout_p" in known.names:
            assert by_name.names.index("dropout_p") == known.names.index("dropout_p")
