"""Derived seeds, and guards that leave the global random state as they found it."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pure_loop.errors import ArgumentTypeError
from pure_loop.random import numpy_state as _numpy
from pure_loop.random.numpy_state import put_back, set_aside
from pure_loop.random.seeds import derive, generator, pop_cpu_seed, push_cpu_seed, reseed, seeded, seeded_all

PATHS = st.tuples(st.integers(), st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4))


def snapshot() -> list[Any]:
    name, key, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest]


def draw_everywhere() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist(), np.random.randn(), random.gauss(0, 1)]


@given(PATHS, PATHS)
@settings(max_examples=50)
def test_derive_is_a_function_of_its_path_and_of_nothing_less(a: Any, b: Any) -> None:
    first, second = derive(a[0], *a[1]), derive(b[0], *b[1])
    assert 0 <= first < 2**63
    assert (first == second) == (a == b)


def test_derive_is_the_same_in_every_process_and_version_and_takes_integers_and_text() -> None:
    assert derive(0) == 2631537505891389924
    assert derive(-1, "\u00e9\ud800", 2**70) == 4822988823359603938
    assert derive(3) != derive("3")  # type: ignore[arg-type]
    assert derive(0, "a", "b") != derive(0, "ab")
    assert derive(0, "a', 'b") != derive(0, "a", "b")
    assert derive(np.int64(5), np.int32(1)) == derive(5, 1)  # type: ignore[arg-type]
    assert derive(True) == derive(1)
    assert derive(0, type("Text", (str,), {})("x")) == derive(0, "x")
    parts: tuple[Any, ...] = (1.0, None, b"a", (1,))
    for part in parts:
        with pytest.raises(ArgumentTypeError, match=r"derive\(0, 'train', .*write derive"):
            derive(0, "train", part)
    drawn = [torch.rand(4, generator=generator(1, name)) for name in ("a", "a", "b")]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert generator(1, "a").device == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0", "meta"])
def test_seeded_gives_the_same_numbers_and_the_old_state_back(device: Any) -> None:
    torch.manual_seed(3)
    torch.randn(1)
    before = snapshot()
    with seeded(5, device):
        first = torch.randn(5)
        with seeded(6):
            assert not torch.equal(torch.randn(5), first)
        second = torch.randn(5)
    assert snapshot() == before
    with seeded(5):
        assert torch.equal(torch.cat([first, second]), torch.cat([torch.randn(5), torch.randn(5)]))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=20)
def test_seeded_all_covers_python_and_numpy(seed: int, one: int, other: int, pair: bool) -> None:
    drawn = []
    for start in (one, other):
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)
        if pair:  # a half of it is left in the state
            np.random.randn()
            random.gauss(0, 1)
        before = snapshot()
        with seeded_all(seed):
            drawn.append(draw_everywhere())
        assert snapshot() == before
    assert drawn[0] == drawn[1]
    with seeded_all(seed):
        reseed(seed)
        assert draw_everywhere() == drawn[0]


def test_pythons_state_is_put_back_whole() -> None:
    alone = random.Random(7)
    alone.gauss(0, 1)
    second_of_a_pair = alone.gauss(0, 1)
    for drawn, pair in itertools.product((0, 1, 623, 624, 625), (False, True)):
        random.seed(3)
        for _ in range(drawn):
            random.getrandbits(32)
        if pair:
            random.gauss(0, 1)
        before = random.getstate()
        with seeded_all(7):
            random.gauss(0, 1)
            with seeded_all(8):
                random.random()
            assert random.gauss(0, 1) == second_of_a_pair
        assert random.getstate() == before


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_numpys_state_is_put_back_whole(slow: bool, pair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _numpy._can_exchange(np.random)
    if slow:
        monkeypatch.setattr(_numpy, "_can_exchange", lambda _: False)
    np.random.seed(3)
    if pair:
        np.random.randn()
    before, own = snapshot(), np.random.get_bit_generator()
    drawn = []
    for noise in (0, 1, 2):
        with seeded_all(5):
            drawn.append(draw_everywhere())
            with seeded_all(6):
                drawn.append(draw_everywhere())
                np.random.randn(noise)
            drawn.append(draw_everywhere())
    assert drawn[:3] == drawn[3:6] == drawn[6:]
    assert snapshot() == before
    assert np.random.get_bit_generator() is own
    expected = np.random.RandomState(3).randn(8)
    assert np.random.randn(8 - pair).tolist() == expected[pair:].tolist()


def test_a_bit_generator_of_the_users_stays_in_its_place() -> None:
    old, own = np.random.get_bit_generator(), np.random.PCG64(1)
    np.random.set_bit_generator(own)
    try:
        with seeded_all(5):
            first = draw_everywhere()
        assert np.random.get_bit_generator() is own
        assert own.state == np.random.PCG64(1).state
    finally:
        np.random.set_bit_generator(old)
    with seeded_all(5):
        assert draw_everywhere() == first


@pytest.mark.parametrize("guard", [seeded, seeded_all])
def test_a_guard_holds_through_an_error(guard: Any) -> None:
    before = snapshot()

    def fail() -> None:
        with guard(1):
            torch.rand(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert snapshot() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("guard", [lambda seed: seeded(seed, "cuda"), lambda seed: seeded(seed, 0), seeded_all])
def test_the_accelerator_is_guarded_too(guard: Any) -> None:
    torch.cuda.manual_seed(1)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    drawn = []
    for _ in range(2):
        with guard(5):
            drawn.append(torch.cat([torch.rand(3, device="cuda").cpu(), torch.rand(3)]))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_numpy_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import torch; from pure_loop.random import seeded_all\n"
        "with seeded_all(1): a = torch.rand(2)\n"
        "with seeded_all(1): assert torch.equal(a, torch.rand(2))\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)


# Garbage that is collected meanwhile. ---------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_garbage_that_seeds_may_be_collected_while_a_state_is_taken() -> None:
    """torch holds its generator's lock meanwhile: what the collector closes would wait for it for ever."""
    closed = []

    def drawing(itself: list[Any]) -> Any:
        try:
            yield itself
        finally:
            with seeded(1):
                closed.append(float(torch.rand(())))

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(20):
            gc.disable()
            circle: list[Any] = []
            circle.append(drawing(circle))
            next(circle[0])
            del circle
            gc.enable()
            before = push_cpu_seed(number)  # the next object that the collector counts is the state
            pop_cpu_seed(before)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(closed) == 20
    assert set(closed) == {closed[0]}


class Cycle:
    """Garbage whose finalizer sets NumPy's state aside, as a stream's does that is closed."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        put_back(np.random, set_aside(np.random))


class Collecting(_numpy._Nothing):
    """The garbage collector may run at any new object."""

    @property
    def state(self) -> Any:
        if gc.isenabled():
            gc.collect()
        return self.words

    @state.setter
    def state(self, words: Any) -> None:
        self.words = words


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_in_the_middle_of_an_exchange(
    collecting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_numpy, "_Nothing", Collecting)
    np.random.seed(3)
    np.random.normal()  # one of a pair is left
    before = snapshot()
    (gc.enable if collecting else gc.disable)()
    try:
        for _ in range(5):
            Cycle()
            put_back(np.random, set_aside(np.random))
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert snapshot() == before
