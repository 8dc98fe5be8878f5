"""Ranks without a cluster: the simulation against gloo, and what a pool of processes does with every fault."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import distributed_c10d as c10d

from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from pure_loop.testing.ranks.processes import Pool, RankError, shared_pool
from pure_loop.testing.ranks.simulation import (
    Collective,
    CollectiveError,
    UnsupportedCollectiveError,
    simulate,
)

torch.set_num_threads(1)

RANKS = 3
# Before, gloo can't send lists around.
LISTS = hasattr(dist, "all_gather_single")


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS, timeout=20) as pool:
        yield pool


def results(program, ranks=RANKS):
    return [ran.result for ran in simulate(program, ranks)]


def ended(pids, within=10.0):
    """Whether no process with these numbers is left, a zombie or an orphan included."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(os.path.exists(f"/proc/{pid}") if os.path.exists("/proc/self") else _lives(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The simulation is exact.


def program_of(steps, dtype, length):
    """A program of a list of collectives, each working on what the one before gave."""

    def program(rank):
        import torch
        import torch.distributed as dist

        n = dist.get_world_size()
        into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scattered = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        x = torch.arange(length).to(getattr(torch, dtype)) + 10 * rank
        seen = []
        for kind, option in steps:
            several = [x + i for i in range(n)]
            empties = [torch.full_like(x, -1) for _ in range(n)]
            y = x.clone()
            if kind == "all_reduce":
                dist.all_reduce(y, getattr(dist.ReduceOp, option))
            elif kind == "async":
                works = [dist.all_reduce(y, async_op=True), dist.broadcast(empties[0], 0, async_op=True)]
                for work in reversed(works[:option]):
                    work.wait()
                works[-1].wait()
                works[0].get_future().wait()
            elif kind == "broadcast":
                dist.broadcast(y, option)
            elif kind == "reduce":
                dist.reduce(y, option)
                y = y if rank == option else x.clone()
            elif kind == "all_gather":
                dist.all_gather(empties, y)
                y = torch.cat(empties)
            elif kind == "all_gather_into_tensor":
                y = torch.cat(empties)
                into(y, x)
            elif kind == "reduce_scatter":
                dist.reduce_scatter(y, several, getattr(dist.ReduceOp, option))
            elif kind == "reduce_scatter_tensor":
                scattered(y, torch.cat(several), getattr(dist.ReduceOp, option))
            elif kind == "all_to_all":
                dist.all_to_all(empties, several)
                y = torch.cat(empties)
            elif kind == "all_to_all_single":
                rows = torch.cat(several * 2)
                sizes = [option[rank][i] for i in range(n)]
                y = torch.full((sum(row[rank] for row in option),), -1).to(x.dtype)
                dist.all_to_all_single(y, rows[: sum(sizes)], [row[rank] for row in option], sizes)
            elif kind == "gather":
                dist.gather(y, empties if rank == option else None, dst=option)
                y = torch.cat(empties)
            elif kind == "scatter":
                dist.scatter(y, several if rank == option else None, src=option)
            elif kind == "objects":
                objects = [None] * n
                dist.all_gather_object(objects, {"rank": rank})
                seen.append(objects)
            else:
                dist.barrier()
            seen.append(y.tolist())
            # Small whole numbers again, so that no order of adding matters; an empty result doesn't end the program.
            x = torch.cat([y.flatten(), x])[:length] % 7 + rank
        return seen

    return program


def steps(ranks):
    rank, op = st.integers(0, ranks - 1), st.sampled_from(["SUM", "MAX", "MIN", "PRODUCT"])
    sizes = st.lists(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    options = {
        "all_reduce": op,
        "async": st.integers(0, 2),
        "broadcast": rank,
        "reduce": rank,
        "all_gather": st.none(),
        "all_gather_into_tensor": st.none(),
        "reduce_scatter": op,
        "reduce_scatter_tensor": op,
        "all_to_all": st.none(),
        "all_to_all_single": sizes,
        "gather": rank,
        "scatter": rank,
        "objects": st.none(),
        "barrier": st.none(),
    }
    if not LISTS:
        del options["all_to_all"]
    return st.sampled_from(sorted(options)).flatmap(lambda kind: st.tuples(st.just(kind), options[kind]))


@given(
    steps=st.lists(steps(RANKS), min_size=1, max_size=6),
    dtype=st.sampled_from(["float64", "float32", "int64"]),
    length=st.integers(1, 4),
)
@settings(max_examples=20)
def test_a_program_gives_what_it_gives_on_gloo(pool, steps, dtype, length):
    program = program_of(steps, dtype, length)
    assert results(program) == pool.run(program)


def test_every_collective_is_known_and_exact(pool):
    ring = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]
    program = program_of(
        [
            *[("all_reduce", op) for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")],
            *[(kind, 1) for kind in ("async", "broadcast", "reduce", "gather", "scatter")],
            *[(kind, None) for kind in ("all_gather", "all_gather_into_tensor", "barrier")],
            *[("all_to_all", None)] * LISTS,
            *[(kind, "SUM") for kind in ("reduce_scatter", "reduce_scatter_tensor")],
            ("all_to_all_single", ring),
        ],
        "float64",
        2,
    )
    ran = simulate(program, RANKS)
    assert [each.result for each in ran] == pool.run(program)
    assert {each.kind for each in ran[0].collectives} == {
        *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor"),
        *("all_to_all_single", "barrier", "reduce_scatter", "reduce_scatter_tensor", *["all_to_all"] * LISTS),
    }
    assert ran[2].collectives[0] == Collective("all_reduce", ((2,),), (torch.float64,), "sum")
    assert str(ran[2].collectives[7]) == "broadcast from rank 1 of (2,) float64"


def test_bits_and_booleans(pool):
    def program(rank):
        found = []
        for op in ("BAND", "BOR", "BXOR"):
            x = torch.tensor([rank + 1, 6 - rank])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        for op in ("SUM", "MAX", "MIN"):
            x = torch.tensor([rank == 0, rank < 3])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        return found

    assert results(program) == pool.run(program)


def test_autograd_sees_of_a_collective_what_it_sees_with_gloo(pool):
    def program(rank):
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        dist.all_reduce(y)
        version = y._version
        y.sum().backward()
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        dist.broadcast(leaf, 1)
        return version, y.tolist(), x.grad.tolist(), leaf.tolist()

    assert results(program) == pool.run(program)


def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    def program(rank):
        total = functional.all_reduce(torch.tensor([rank + 1.0]), "sum", group=dist.group.WORLD)
        later = functional.all_reduce(torch.tensor([1.0]), "sum", group=dist.group.WORLD)
        dist.barrier()
        gather, scatter = (
            getattr(functional, f"{name}_single_coalesced", None) or getattr(functional, old)
            for name, old in (
                ("all_gather", "all_gather_into_tensor_coalesced"),
                ("reduce_scatter", "reduce_scatter_tensor_coalesced"),
            )
        )
        pair = [torch.tensor([rank, 2]), torch.tensor([rank + 5, 7])]
        gathered = [each.tolist() for each in gather(pair, group=dist.group.WORLD)]
        scattered = [each.tolist() for each in scatter(pair, "sum", [0, 0], group=dist.group.WORLD)]
        return total.tolist(), later.tolist(), gathered, scattered

    waiting = torch._C._distributed_c10d._get_work_registry_size()
    everything = [[0, 2, 1, 2], [5, 7, 6, 7]]
    assert results(program, 2) == [
        ([3.0], [2.0], everything, [[1], [11]]),
        ([3.0], [2.0], everything, [[4], [14]]),
    ]
    # What a program that was left would have waited for is not kept until the interpreter ends.
    assert torch._C._distributed_c10d._get_work_registry_size() == waiting


@pytest.mark.thorough
def test_distributed_data_parallel():
    def program(rank):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(2):
            x = torch.arange(12.0).view(4, 3) + rank + step
            model(x).square().sum().backward()
        return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]

    simulated = results(program, 2)
    assert simulated[0][0] == simulated[1][0]
    assert shared_pool(2, checked=False).run(program) == simulated
    with pytest.raises(RankError, match=r"SIGSEGV .* use Pool\(checked=False\)"):
        shared_pool(2).run(program)
    assert shared_pool(2).run(lambda rank: rank) == [0, 1]


def test_collectives_that_are_issued_together(pool):
    def program(rank):
        x, y, z = (torch.tensor([rank + 1.0 + i]) for i in range(3))
        with c10d._coalescing_manager():
            dist.all_reduce(x)
            dist.broadcast(y, 1)
            dist.all_reduce(z)
        return x.item(), y.item(), z.item()

    assert results(program) == pool.run(program) == [(6.0, 3.0, 12.0)] * 3


def test_an_asynchronous_result_arrives_when_it_is_waited_for():
    def program(rank):
        x = torch.tensor([rank + 1.0])
        work = dist.all_reduce(x, async_op=True)
        before = x.item()
        assert work.wait()
        return before, x.item()

    assert results(program, 2) == [(1.0, 3.0), (2.0, 3.0)]


def test_a_program_knows_its_place(pool):
    def program(rank):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        drawn = torch.rand(2).tolist()
        group = dist.group.WORLD
        return (
            [os.environ[name] for name in names],
            (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_rank(group), group.size()),
            (dist.get_backend(), dist.get_process_group_ranks(group), dist.get_global_rank(group, rank)),
            drawn,
        )

    first, *_, last = results(program)
    assert first[0][:4] == ["0", "0", "3", "3"]
    assert last[1] == (True, 2, 3, 2, 3)
    assert first[3] != last[3]
    assert results(program) == pool.run(program) == pool.run(program)


# The simulation tells what would hang.


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


WRONG = {
    "uneven": (
        lambda rank: [dist.all_reduce(ones(3)) for _ in range(2 + (rank == 1))],
        ["number 3", "rank 0: ended after 2", "rank 1: all_reduce (sum) of (3,) float32"],
    ),
    "uneven the other way": (
        lambda rank: [dist.all_reduce(ones(3)) for _ in range(2 - rank)],
        ["number 2", "rank 0: all_reduce (sum) of (3,) float32", "rank 1: ended after 1"],
    ),
    "reordered": (
        lambda rank: [f() for f in [lambda: dist.broadcast(ones(3), 0), dist.barrier][:: 1 - 2 * rank]],
        ["number 1", "rank 0: broadcast from rank 0 of (3,) float32", "rank 1: barrier"],
    ),
    "shapes": (
        lambda rank: dist.all_reduce(ones(2 + rank)),
        ["rank 0: all_reduce (sum) of (2,) float32", "rank 1: all_reduce (sum) of (3,) float32"],
    ),
    "dtypes": (
        lambda rank: dist.all_reduce(ones(2, dtype=(torch.float64, torch.int64)[rank])),
        ["of (2,) float64", "of (2,) int64"],
    ),
    "operations": (
        lambda rank: dist.all_reduce(ones(2), (dist.ReduceOp.MAX, dist.ReduceOp.AVG)[rank]),
        ["rank 0: all_reduce (max)", "rank 1: all_reduce (avg)"],
    ),
    "sources": (lambda rank: dist.broadcast(ones(2), rank), ["from rank 0", "from rank 1"]),
    "parts": (
        lambda rank: dist.all_to_all([ones(2), ones(1)], [ones(1 + rank), ones(2)]),
        ["rank 0: all_to_all of (1,) float32, (2,) float32", "Rank 0 expects something else from rank 0"],
    ),
    "a list that is too short": (
        lambda rank: dist.all_gather([ones(2)], ones(2)),
        ["rank 0 of 2 calls all_gather", "1 tensors for 2 ranks"],
    ),
    "a list of another shape": (
        lambda rank: dist.all_gather([ones(2), ones(3)], ones(2)),
        ["rank 0 of 2 calls all_gather", "(3,) float32", "(2,) float32"],
    ),
    "a whole that doesn't divide": (
        lambda rank: (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(ones(2), ones(5)),
        ["reduce_scatter_tensor", "(5,) float32 is not 2 times (2,) float32"],
    ),
    "splits": (
        lambda rank: dist.all_to_all_single(ones(3), ones(3)),
        ["all_to_all_single", "3 rows don't split into [1, 1]"],
    ),
    "memory": (
        lambda rank: dist.all_reduce(ones(4, 4)[:, ::2]),
        ["all_reduce", "(4, 2) float32 with strides (4, 2) is not contiguous", ".contiguous()"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_disagree_are_named(name):
    program, words = WRONG[name]
    with pytest.raises(CollectiveError) as caught:
        simulate(program, 2)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(AssertionError):
        simulate(program, 2)


def test_of_many_ranks_each_is_named():
    def program(rank):
        dist.barrier()
        if rank != 2:
            dist.all_reduce(ones(1))

    with pytest.raises(CollectiveError, match=r"(?s)4 ranks.*number 2.*rank 2: ended after 1\n  rank 3: all_reduce"):
        simulate(program, 4)


@pytest.mark.parametrize("name", ["uneven", "shapes", "splits"])
def test_a_program_can_not_hide_a_disagreement(name):
    def program(rank):
        try:
            WRONG[name][0](rank)
        except Exception:  # the broadest that programs write, so that no kind of error could be hidden
            return "fine"

    with pytest.raises(CollectiveError):
        simulate(program, 2)


def test_cleaning_up_does_not_confuse_it():
    def program(rank):
        x = torch.tensor([rank + 1.0])
        try:
            dist.all_reduce(x)
        except BaseException:  # a clean-up like this one sees what the simulation itself raises to leave a program
            dist.barrier()
            raise
        finally:
            dist.all_reduce(x)
        return x.item()

    assert results(program, 2) == [6.0, 6.0]


def test_an_interrupt_comes_through():
    def program(rank):
        try:
            dist.barrier()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(program, 2)


UNSUPPORTED = {
    "send": lambda rank: dist.send(ones(1), 1 - rank),
    "recv": lambda rank: dist.irecv(ones(1), 1 - rank),
    "new_group": lambda rank: dist.new_group([0]),
    "destroy_process_group": lambda rank: dist.destroy_process_group(),
    "sparse": lambda rank: dist.all_reduce(torch.eye(2).to_sparse()),
    "PREMUL_SUM": lambda rank: dist.all_reduce(ones(1), _make_nccl_premul_sum(2.0)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_simulated_says_so(name):
    with pytest.raises(UnsupportedCollectiveError, match=name) as caught:
        simulate(UNSUPPORTED[name], 2)
    assert isinstance(caught.value, NotImplementedError)
    assert not dist.is_initialized()


def test_a_nan_does_not_look_like_a_change():
    def program(rank):
        x = torch.tensor([float("nan"), rank])
        for _ in range(2):
            dist.all_reduce(x)
        return x[1].item()

    assert results(program, 2) == [2.0, 2.0]


def test_a_program_that_changes_between_its_runs_is_caught():
    runs = []

    def other_numbers(rank):
        runs.append(rank)
        dist.all_reduce(torch.tensor([float(len(runs))]))

    def other_collectives(rank):
        runs.append(rank)
        dist.all_reduce(ones(1)) if len(runs) == 3 else dist.barrier()

    def fewer(rank):
        runs.append(rank)
        if len(runs) < 3:
            dist.barrier()

    for program, words in (
        (other_numbers, "number 1 was all_reduce .* had other numbers"),
        (other_collectives, "rank 0 of 2 .* number 1 was barrier, and on the next run it was all_reduce"),
        (fewer, "rank 0 of 2 .* number 1 was barrier, and on the next run it ended"),
    ):
        runs.clear()
        with pytest.raises(CollectiveError, match=words):
            simulate(program, 2)


def test_what_a_collective_overwrites_may_hold_anything():
    fresh = itertools.count()

    def program(rank):
        x = torch.tensor([next(fresh) if rank else 5])
        dist.broadcast(x, 0)
        y = torch.tensor([next(fresh)])
        dist.scatter(y, [x, x + 1] if rank == 0 else None, src=0)
        return x.item(), y.item()

    assert results(program, 2) == [(5, 5), (5, 6)]


# It leaves all as it was.


def surroundings():
    return (
        dict(os.environ),
        c10d._world,
        dist.is_initialized(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
    )


def raising(rank):
    torch.manual_seed(5)
    dist.barrier()
    if rank == 1:
        raise KeyError("gone")


@pytest.mark.parametrize("program", [raising, *[WRONG[name][0] for name in WRONG], *UNSUPPORTED.values()])
def test_everything_is_restored(program, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = surroundings()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is
        simulate(program, 2)
    assert surroundings() == before
    simulate(lambda rank: torch.rand(rank), 2)
    assert surroundings() == before


def test_an_exception_names_its_rank():
    with pytest.raises(KeyError, match="gone") as caught:
        simulate(raising, 2)
    assert caught.value.__notes__ == ["On rank 1 of 2, simulated, after 1 collectives."]


def test_it_runs_inside_a_process_group_and_inside_itself():
    def inner(rank):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        return x.item()

    def outer(rank):
        x = torch.tensor([10.0 * rank])
        dist.all_reduce(x)
        nested = results(inner, 2)
        dist.all_reduce(x)
        return x.item(), nested, dist.get_rank(), os.environ["RANK"]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert results(outer, 3) == [(90.0, [3.0, 3.0], rank, str(rank)) for rank in range(3)]
        assert dist.group.WORLD is group
        x = ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_the_group_of_a_simulation_that_is_over_says_so():
    kept = []
    simulate(lambda rank: kept.append(dist.group.WORLD), 1)
    with pytest.raises(CollectiveError, match="simulation that is over"):
        dist.all_reduce(ones(1), group=kept[0])


# It is cheap.


def test_a_program_runs_hardly_more_often_than_it_has_collectives():
    runs = []

    def program(rank, collectives):
        runs.append(rank)
        for _ in range(collectives):
            dist.all_reduce(ones(2))

    for ranks, collectives, expected in ((2, 0, 2), (2, 2, 4), (2, 5, 7), (3, 0, 3), (3, 4, 11), (1, 9, 1)):
        runs.clear()
        simulate(lambda rank, c=collectives: program(rank, c), ranks)
        assert len(runs) == expected

    def timed():
        begun = time.perf_counter()
        simulate(lambda rank: program(rank, 2), 2)
        return time.perf_counter() - begun

    assert min(timed() for _ in range(30)) < 0.005


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, 2), ArgumentTypeError),
        ((print, "2"), ArgumentTypeError),
        ((print, True), ArgumentTypeError),
        ((print, 0), ArgumentError),
    ],
)
def test_simulate_with_bad_arguments(arguments, error):
    with pytest.raises(error, match=r"simulate\("):
        simulate(*arguments)


# The pool.


def pids(pool):
    return pool.run(lambda rank: os.getpid())


def test_an_exception_reaches_the_parent_and_the_others_go_on(pool):
    def program(rank):
        print("before it")
        if rank == 1:
            time.sleep(0.05)
            raise ZeroDivisionError("on one")
        dist.all_reduce(torch.ones(2))

    before = pids(pool)
    begun = time.monotonic()
    with pytest.raises(RankError, match=f"rank 1 of {RANKS} raised ZeroDivisionError: on one") as caught:
        pool.run(program)
    assert time.monotonic() - begun < 10
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.ranks == (1,)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.traceback.startswith("Traceback")
    assert 'raise ZeroDivisionError("on one")' in error.traceback
    assert "_worker.py" not in error.traceback
    assert error.traceback.strip() in str(error)
    assert "Rank 1 wrote:\n\nbefore it" in str(error)
    # They came to rest, so nobody was killed, and no message of the old program is left.
    assert pids(pool) == before
    assert pool.run(program_of([("all_reduce", "SUM")], "int64", 2)) == [[[30, 33]]] * RANKS


def test_collectives_that_differ_are_an_error_on_gloo_too(pool):
    with pytest.raises(RankError, match="mismatch between collectives"):
        pool.run(lambda rank: dist.all_reduce(torch.ones(2 + rank)))


def test_what_can_not_be_sent(pool, monkeypatch):
    lock = threading.Lock()
    before = pids(pool)
    with pytest.raises(ArgumentTypeError, match="can't be sent to another process"):
        pool.run(lambda rank: lock)
    with pytest.raises(ArgumentTypeError, match="give a function of the rank"):
        pool.run(3)
    with pytest.raises(RankError, match="rank 2 of 3 returned a generator that can't be pickled"):
        pool.run(lambda rank: (i for i in range(3)) if rank == 2 else rank)

    class StubbornError(Exception):
        def __reduce__(self):
            return (int, ("no number",))

    def stubborn(rank):
        raise StubbornError

    with pytest.raises(RankError, match=r"rank \d of 3 raised .*StubbornError") as caught:
        pool.run(stubborn)
    assert caught.value.__cause__ is None
    with pytest.raises(RankError, match="the program destroyed the default process group"):
        pool.run(lambda rank: dist.destroy_process_group())
    assert pids(pool) == before
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pure_loop\[testing\]'"):
        pool.run(lambda rank: rank)


def test_faults_end_processes_and_the_next_run_starts_new_ones(tmp_path):
    pool = Pool(2, timeout=3, checked=False)
    assert repr(pool) == "Pool(2, timeout=3.0, checked=False)"
    first = pids(pool)
    sums = program_of([("all_reduce", "SUM")], "int64", 2)
    assert pool.run(sums) == results(sums, 2)

    def hangs(rank):
        helper = subprocess.Popen(["sleep", "600"])
        (tmp_path / str(rank)).write_text(str(helper.pid))
        if rank == 1:
            dist.all_reduce(torch.ones(1))
        return rank

    begun = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not answer within 3 s") as caught:
        pool.run(hangs)
    assert 2.5 < time.monotonic() - begun < 30
    assert caught.value.ranks == (1,)
    assert "Rank 1 is at:" in str(caught.value)
    assert "in hangs" in str(caught.value)
    helpers = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert ended(first)
    assert ended(helpers)

    def dies(rank):
        if rank == 0:
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    second = pids(pool)
    assert not set(first) & set(second)
    with pytest.raises(RankError, match="rank 0 of 2 was killed by SIGKILL without an answer") as caught:
        pool.run(dies)
    assert caught.value.ranks == (0,)
    assert "last words" in str(caught.value)
    assert ended(second)
    pool.close()
    pool.close()


def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading, time\n"
        "from pure_loop.testing.ranks.processes import Pool\n"
        "def endless(rank):\n"
        "    print(os.getpid(), file=open(told, 'w'), flush=True)\n"
        "    while True:\n"
        "        pass\n"
        f"told = {str(tmp_path / 'told')!r}\n"
        "pool = Pool(1)\n"
        "threading.Thread(target=lambda: pool.run(endless), daemon=True).start()\n"
        "while not os.path.exists(told) or not open(told).read().strip():\n"
        "    time.sleep(0.02)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, str(script)], env=environ, timeout=120, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ended([int((tmp_path / "told").read_text())])


def test_a_pool_with_bad_arguments():
    for arguments, error in (
        ({"ranks": "2"}, ArgumentTypeError),
        ({"ranks": True}, ArgumentTypeError),
        ({"ranks": 0}, ArgumentError),
        ({"timeout": "1"}, ArgumentTypeError),
        ({"timeout": 0}, ArgumentError),
        ({"timeout": float("nan")}, ArgumentError),
    ):
        with pytest.raises(error, match=r"Pool\("):
            Pool(**arguments)


def test_one_pool_is_shared():
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool(2) is not shared_pool(3)
    assert shared_pool(2) is not shared_pool(2, checked=False)
    assert shared_pool(2).ranks == 2
