"""Compiled steps through the compiler itself: where it would change numbers, or how they lie in memory.

Each graph takes it seconds; what is marked thorough is of one setting, or of one mistake of torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn.functional import cross_entropy, pixel_shuffle, relu

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import _torch, interpreted, operations, record
from pure_loop.errors import NonFiniteError
from tests.support import problem
from tests.support.compiling import BATCHES, FIVE, WITH_NAN, fit, mlp, net, same, several
from tests.support.problem import CLASSES
from tests.support.streams import leaves

TWO = FIVE[:2]
END = {Event.FIT_END}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def images(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels come last where the compiler likes it, and it may give some of the outputs as one tensor."""
    out: Tensor = self.two(self.one(x.repeat(1, 4).reshape(-1, 1, 4, 4)))
    return out, out * torch.ones_like(out), out.detach(), out[:, :2]


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())


def of_all(outputs: tuple[Tensor, Tensor, Tensor, Tensor], targets: Tensor) -> dict[str, Tensor]:
    out, again, target, part = outputs
    loss = cross_entropy(out, targets) + (out.exp() - target).square().mean() + part.square().sum() + again.exp().mean()
    return {"total": loss, "shown": loss.detach()}


@pl.algorithm(Event.AFTER_FORWARD)
def summed(state: pl.State) -> pl.State:
    """The gradient by one of the outputs is one number, seen in each place."""
    out, again, target, part = state.outputs
    return state.replace(outputs=(out, again.sum(0), target, part))


NAMES = ("first", "second", "third", "x", "y", "copied", "moved", "times_one")


@pl.algorithm(
    Event.AFTER_LOSS, init=lambda _: {name: torch.arange(12.0).reshape(4, 3) + i for i, name in enumerate(NAMES)}
)
def rotated(state: pl.State) -> pl.State:
    """Each tensor takes another one's place, one of them with two rows put in; all are shown as they were."""
    old = state.algorithm_state["rotated"]
    put = old["x"].index_put((torch.tensor([1]),), old["first"][0])
    put = put.index_put((torch.tensor([2]),), old["first"][3])
    new = {"first": old["second"], "second": old["third"], "third": old["first"], "x": old["y"], "y": put}
    copied = torch.empty_like(old["copied"])
    copied[:] = old["copied"]
    copied[torch.tensor([1])] = 7.0
    new |= {"copied": old["moved"], "moved": copied, "times_one": old["times_one"] + 1}
    shown = (torch.ones(12) * old["times_one"].view(-1)).view(4, 3)
    number = torch.zeros(()) + state.timestamp.batch
    return state.remember("rotated", new).replace(outputs=(state.outputs, *old.values(), shown, number))


def by_a_kernel(self: Any, x: Tensor) -> Tensor:
    """It has a constant, which code is given beside its arguments."""
    kernel = torch.tensor([[float(i * j % 7) for i in range(CLASSES)] for j in range(CLASSES)])
    out: Tensor = self.one(x) @ kernel
    return out


OBSERVED = {"model": net(images, pixels, lambda: nn.Linear(32, CLASSES)), "loss": of_all, "algorithms": [summed]}
# torch 2.13 takes copies of what a graph writes to out of it, and computes in the place of what is overwritten; it
# merges `a + 0.01 * b` with a matrix product, and leaves out the 0.01.
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a forward that is observed": (
        OBSERVED | {"watch": {Event.AFTER_FORWARD, Event.AFTER_LOSS}},
        ["forward", "BEFORE_LOSS to loss", "update"],
    ),
    "memory that moves, and is shown": ({"model": problem.mlp, "algorithms": [rotated], "watch": BATCHES}, ["step"]),
    "a constant": ({"model": net(by_a_kernel), "optimizer": pl.optim.sgd(lr=0.01)}, ["step"]),
}


@pytest.mark.slow  # each graph takes torch's compiler seconds
@pytest.mark.parametrize("name", SETTINGS)
def test_a_compiled_step_is_the_eager_one(name: str) -> None:
    settings, segments = SETTINGS[name]
    with record() as made:
        same({"watch": END, "data": TWO, "max_duration": "2ba"} | settings, 1e-5)
    assert [each.segment for each in made] == segments
    assert all(each.seconds > 0 and each.operations > 10 for each in made)


@pytest.mark.thorough
def test_a_compiler_that_believes_in_zero() -> None:
    """A product with zero is not zero where the other factor is not finite."""
    with pytest.raises(NonFiniteError, match="batch 1 "):
        fit(problem.mlp, compile=True, data=WITH_NAN)


# Images: how they lie in memory is that of eager steps.


def written(images: Tensor) -> Tensor:
    images = images.clone()
    images.view(len(images), -1)[:, 3] = 1.0
    return images


Function = Callable[[Tensor], Tensor]
VIEWS: tuple[Function, ...] = (
    lambda images: images.mean(2).view(len(images), -1),
    lambda images: images.permute(0, 2, 3, 1).contiguous().view(len(images), -1),
    lambda images: pixel_shuffle(images[:, :4], 2).flatten(1),
    lambda images: written(images).flatten(1),
)
IMAGES = [(torch.randn(6, 3, 6, 6, generator=problem.noise(i)), torch.arange(6) % 3 + i % 2) for i in range(2)]


def assert_layout(between: Function, views: tuple[Function, ...], channels: int = 3, **settings: Any) -> None:
    """What stands between two convolutions, and what is made of the second one's outputs."""

    def forward(self: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.two(between(self.one(images[:, :channels].contiguous())))
        return outputs, torch.cat([view(outputs) for view in views], 1)

    first = lambda: nn.Sequential(nn.Conv2d(channels, 4, 3, bias=False), nn.BatchNorm2d(4))  # noqa: E731
    settings |= {"model": net(forward, first, lambda: nn.Conv2d(4, 5, 3)), "data": IMAGES, "max_duration": "2ba"}
    settings |= {"loss": lambda outputs, y: cross_entropy(outputs[1], y), "optimizer": pl.optim.sgd(0.1, momentum=0.9)}
    found, wanted = (fit(compile=compiles, watch=BATCHES, **settings) for compiles in (True, False))
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        actual = leaves(one)
        for path, value in leaves(other).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(actual[path], value, rtol=1e-4, atol=1e-5, check_stride=True, msg=path)


def test_images_lie_in_memory_as_in_eager_steps() -> None:
    with interpreted():
        assert_layout(relu, VIEWS)
        assert_layout(lambda images: images.as_strided(images.shape, (64, 1, 4, 16)), VIEWS[3:])


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_images_through_the_compiler(channels: int) -> None:
    """Strides say nothing of a single channel; those of a microbatch are a part of those of the batch."""
    assert_layout(relu, VIEWS[:1], channels, microbatch_size=3 if channels == 1 else None)


# What it does without each private name of torch that compiling uses, and without all.

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


def assert_as_alone() -> None:
    """Members, one of whose operations (batch norm) torch maps by a loop without these names."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    data = FIVE[:2]
    settings: Any = {"loss": torch.nn.functional.cross_entropy, "max_duration": "2ba", "watch": {Event.BATCH_END}}
    optimizer = pl.optim.sgd(lr=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        state = pl.run(pl.fit(pl.ensemble(make, seeds=[0, 1]), data, optimizer=optimizer, **settings))
    for number in range(2):
        torch.manual_seed(number)
        solo = pl.run(pl.fit(make(), data, seed=number, optimizer=optimizer, **settings))
        for name, tensor in solo.params.items():
            torch.testing.assert_close(state.member(number).params[name], tensor)


@pytest.mark.usefixtures("no_code")
def test_a_step_is_traced_and_called_without_all(hide: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    assert not _torch.look_up_all()
    hide(*_torch.NAMES)
    with interpreted():
        assert_as_eager(algorithms=several())
        assert_as_eager(watch=PARTS)
    assert _torch.missing.keys() >= dotted(ENTRY, "torch._dispatch.python.enable_python_dispatcher")
    assert_as_eager(model=problem.mlp)
    assert_as_alone()
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


@pytest.mark.parametrize("of_members", [False, True])
def test_only_images_of_members_keep_the_layout_of_their_pixels(of_members: bool) -> None:
    """What is around a convolution in groups is not vectorised where its channels come last."""
    from torch._inductor import config

    graph = _torch.make_fx(lambda pixels: [pixels.relu()])(torch.ones(2))
    if of_members:
        graph.meta[_torch.OF_MEMBERS] = True
    settings: list[bool] = []

    def compiled(*_: object, **options: object) -> str:
        settings.append(config.layout_optimization)
        return "the code"

    found = {**dict.fromkeys(_torch.NAMES), "torch._inductor.compile_fx:compile_fx_inner": compiled}
    found = {**found, "torch._inductor.fx_passes.joint_graph:joint_graph_passes": lambda graph: None}
    with patch.object(_torch, "_find", lambda path, find=_torch._find: found.get(path) or find(path)):
        assert _torch._by_inductor(graph, [torch.ones(2)], None) == "the code"
    assert settings == [not of_members]
