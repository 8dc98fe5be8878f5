"""Two ranks that real launchers start, on this machine: Slurm's srun and sbatch, mpirun, torchrun and Ray Train.

Where ranks are killed, stopped or out of time, and are started again, every State is that of the run that was left
alone, bit by bit. Skipped where the launcher is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launched_runs import check_bitwise, order
from tests.support.slurm import Slurm, missing
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "tests.support.launched_runs")
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
FOREIGN = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_")
KILLS = 20
# Seconds in which a rank is named on a busy machine, with the imports.
NAMED = 60.0
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'"
)
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed: apt install openmpi-bin"
)


def start(*command, timeout=120, environ=ENVIRON):
    """What it says, once it has ended; it is killed with all that it started if that takes too long."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=ours | environ, cwd=ROOT, stdout=said, stderr=said)
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
                process.wait()
        said.seek(0)
        text = said.read()
    return code, text


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """The folder of a run by torchrun that nothing disturbs."""
    folders = {}

    def folder_of(kind, epochs=2):
        if (kind, epochs) not in folders:
            folder = folders[kind, epochs] = tmp_path_factory.mktemp("alone") / "run"
            order(folder, parallel=kind, epochs=epochs)
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--local-addr=127.0.0.1")
            code, said = start(sys.executable, *torchrun, *RUN[1:], str(folder))
            assert code == 0, said
        return folders[kind, epochs]

    return folder_of


@pytest.fixture(scope="module")
def slurm():
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(Path(folder)) as slurm:
        yield slurm


@pytest.fixture
def folder():
    """Of a short name: Ray's sockets are in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def test_a_digest_that_differs_is_found(tmp_path):
    """As are a run that began again, and a rank that did not come to its end."""
    wanted, given = tmp_path / "wanted", tmp_path / "given"
    whole = [f"{batch} {batch}{batch}" for batch in range(1, 7)] + ["ended 66"]
    for folder, texts in ((wanted, [whole]), (given, [[*whole[:4], "killed BATCH_END"], whole[3:]])):
        order(folder)
        for rank, attempt in itertools.product(range(2), range(len(texts))):
            lines = [line for line in texts[attempt] if rank == 0 or "killed" not in line]
            (folder / f"{rank}.{attempt}").write_text("\n".join(lines))
    assert check_bitwise(given, wanted, starts=2) == 2
    for changed in (["4 45", *whole[4:]], whole, whole[3:-1], [*whole[3:], "killed INIT"]):
        (given / "1.1").write_text("\n".join(changed))
        with pytest.raises(AssertionError):
            check_bitwise(given, wanted, starts=2)


BATCH = """#!/bin/bash
#SBATCH --ntasks=2 --requeue --open-mode=append --output={folder}/said
srun --kill-on-bad-exit {run} {folder}
code=$?
case "$code" in 75|137|143) exec scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
"""


def submit(slurm, folder, timeout):
    """Let Slurm run the job until it has ended for good; gives how many times it was started again."""
    script = folder / "job.sh"
    script.write_text(BATCH.format(folder=folder, run=" ".join(RUN)))
    number = slurm.run("sbatch", "--parsable", f"--chdir={ROOT}", str(script), **ENVIRON).strip()
    job = slurm.finished(number, timeout)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (job, (folder / "said").read_text()[-4000:])
    return int(job["Restarts"])


def test_srun_starts_ranks(slurm, folder, left_alone):
    order(folder)
    slurm.run("srun", "--ntasks=2", f"--chdir={ROOT}", *RUN, str(folder), **ENVIRON)
    check_bitwise(folder, left_alone("replicate"))


@pytest.mark.parametrize(
    ("kind", "kills"), [("replicate", 1), pytest.param("shard", KILLS, marks=pytest.mark.thorough)]
)
def test_slurm_requeues_what_is_killed_and_it_trains_on_bitwise(slurm, folder, left_alone, kind, kills):
    """The batch script asks for it; Slurm starts the job again a few seconds later."""
    epochs = 2 if kills == 1 else 9
    order(folder, kills=kills, parallel=kind, epochs=epochs)
    assert submit(slurm, folder, 60 + 40 * kills) == kills
    check_bitwise(folder, left_alone(kind, epochs), starts=kills + 1)


def test_slurm_requeues_what_stops_before_its_time_limit(slurm, folder, left_alone):
    """Both ranks save, and end with 75."""
    order(folder, stop_before="12s")
    restarts = submit(slurm, folder, 120)
    assert check_bitwise(folder, left_alone("replicate"), starts=None, killed=False) == restarts + 1


@needs_mpirun
def test_mpirun_starts_ranks(folder, left_alone):
    order(folder, parallel="shard")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo", "-n", "2")
    code, said = start(*mpirun, *RUN, str(folder))
    assert code == 0, said
    check_bitwise(folder, left_alone("shard"))


def under_ray(folder, failures, timeout):
    code, said = start(sys.executable, "-m", "tests.support.ray_runs", str(folder), str(failures), timeout=timeout)
    assert code == 0, said[-6000:]


@needs_ray
@pytest.mark.parametrize(
    ("kind", "kills"), [("shard", 1), pytest.param("replicate", KILLS, marks=pytest.mark.thorough)]
)
def test_ray_train_starts_again_what_is_killed_and_it_trains_on_bitwise(folder, left_alone, kind, kills):
    """Ray ends all workers where one is killed, and starts as many new ones."""
    epochs = 2 if kills == 1 else 9
    order(folder, kills=kills, parallel=kind, epochs=epochs)
    under_ray(folder, kills, 60 + 40 * kills)
    check_bitwise(folder, left_alone(kind, epochs), starts=kills + 1)


# A rank whose machine is lost: it is stopped, or killed, in the midst of a batch.

STOPPED = [(1, signal.SIGSTOP), (0, signal.SIGSTOP)]
LOST = tiers([*STOPPED, (0, signal.SIGKILL)], {(0, signal.SIGSTOP), (0, signal.SIGKILL)})


def check_named(folder, lost):
    """The other rank raised an error that names the lost one, in time."""
    (error,) = (path.read_text() for path in folder.glob("error*"))
    seconds, _, text = error.partition(" ")
    assert re.search(rf"rank {1 - lost} of 2 waited .* rank {lost} did not come .* the timeout is 5 s", text), error
    assert float(seconds) < NAMED


@pytest.mark.parametrize(("lost", "sent"), LOST)
def test_under_srun_a_rank_that_is_lost_is_named_and_the_step_ends(slurm, folder, lost, sent):
    """Slurm kills what is stopped."""
    order(folder, kills=1, who=lost, sent=sent, timeout=5)
    # Where a rank is killed Slurm would end the other before it can say a word.
    bad_exit, started = f"--kill-on-bad-exit={int(sent == signal.SIGSTOP)}", time.monotonic()
    slurm.run("srun", "--ntasks=2", bad_exit, f"--chdir={ROOT}", *RUN, str(folder), check=False, **ENVIRON)
    assert time.monotonic() - started < NAMED
    check_named(folder, lost)


@needs_ray
@pytest.mark.thorough
@pytest.mark.parametrize(("lost", "sent"), STOPPED)
def test_under_ray_train_a_rank_that_is_lost_is_named_and_all_start_again(folder, left_alone, lost, sent):
    """In the process group that Ray makes, whose own timeout is half an hour."""
    order(folder, kills=1, who=lost, sent=sent, timeout=5)
    under_ray(folder, 1, 100)
    check_named(folder, lost)
    check_bitwise(folder, left_alone("replicate"), starts=2)
