"""Slurm on this machine alone: its daemons listen on 127.0.0.1, and everything they write is in one folder.

>>> with Slurm(folder) as slurm:  # doctest: +SKIP
...     slurm.run("srun", "-n2", "hostname")
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"

# One node of two CPUs, which several jobs may share. A requeued job waits for as long as a credential is valid.
_CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_setup_env_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=p Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why Slurm can't be started here; empty: it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    return f"Slurm is not installed ({', '.join(absent)}): apt install slurm-wlm munge" if absent else ""


class Slurm:
    """A controller and one node, as a context manager.

    Args:
        folder: of everything that is written; no other user may write to it, as munge asks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        key, host = self.folder / "munge" / "key", socket.gethostname().partition(".")[0]
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        conf = self.folder / "slurm.conf"
        conf.write_text(_CONF.format(host=host, user=getpass.getuser(), folder=self.folder, ports=free_ports(2)))
        try:
            files = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
            self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge/socket", *files)
            self._start("slurmctld", "-D", "-f", str(conf))
            self._start("slurmd", "-D", "-f", str(conf))
            self._await(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T", check=False), 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if len(self._daemons) == 3:
                self.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}", check=False)
                self.run("scancel", f"--user={getpass.getuser()}", check=False)
                self._await(lambda: not self.run("squeue", "-h", check=False), 60)
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.txt").open("ab") as said:
            daemon = subprocess.Popen(command, env=self.environ(), stdout=said, stderr=said)
        self._daemons.append(daemon)
        time.sleep(0.5)
        if daemon.poll() is not None:
            raise RuntimeError(f"{command[0]} ended: {(self.folder / 'daemons.txt').read_text()}")

    def _await(self, is_so: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"Slurm: {self.run('squeue', check=False)} {self.run('sinfo', '-R', check=False)}")
            time.sleep(0.2)

    def environ(self) -> dict[str, str]:
        """The environment in which commands find this Slurm."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def run(self, *command: str, timeout: float = 120.0, check: bool = True, **environ: str) -> str:
        """What a command of Slurm prints; where it fails, and check, AssertionError with what it said."""
        environ = {**self.environ(), **environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: its JobState, Restarts, ExitCode."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def finished(self, number: str, timeout: float) -> dict[str, str]:
        """The same once the job has ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._await(lambda: self.job(number)["JobState"] in ended, timeout)
        return self.job(number)


@contextlib.contextmanager
def _listening(number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]


def free_ports(number: int) -> list[int]:
    """Ports of 127.0.0.1 at which nothing listens now."""
    with _listening(number) as servers:
        return [server.getsockname()[1] for server in servers]
