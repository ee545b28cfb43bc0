"""A real Slurm of one node, in a mount and a network namespace of its own, with every file at its usual path."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
SCRIPTS = REPOSITORY / "deploy" / "slurm"

_PREPARE = """
set -eu
ip link set lo up
# glibc resolves no address of IPv4 while 127.0.0.1 is the only one (AI_ADDRCONFIG).
ip address add 192.0.2.1/32 dev lo
for folder in /run /etc/slurm /etc/munge /var/lib/munge /var/log /opt; do
    mkdir -p $folder
    mount -t tmpfs none $folder
done
mkdir -p /run/munge /run/slurm/controller /run/slurm/node /run/gpumem /opt/gpumem-exporter/bin /etc/slurm/epilog.d
mount --bind "$run" /run/gpumem
chmod 700 /etc/munge /var/lib/munge
(umask 077 && head -c 128 /dev/urandom >/etc/munge/munge.key)
cp "$configuration" /etc/slurm/slurm.conf
cp "$scripts/gpumem-task-prolog" /etc/slurm/
cp "$scripts/gpumem-epilog" /etc/slurm/epilog.d/
sed -n 's/^d \\([^ ]*\\) .*/\\1/p' "$scripts/gpumem.tmpfiles" | xargs mkdir -p
printf '#!/bin/sh\\nPYTHONPATH=%s exec %s -m gpumem_exporter "$@"\\n' "$exporter_path" "$python" \\
    >/opt/gpumem-exporter/bin/gpumem-exporter
chmod 755 /opt/gpumem-exporter/bin/gpumem-exporter
echo ready
exec sleep infinity
"""
_DAEMONS = {"munged": ("--foreground",), "slurmctld": ("-D",), "slurmd": ("-D", "-N", "node0")}


class Cluster:
    """munged, slurmctld and slurmd with the scripts of deploy/slurm as they are.

    `folder / "run"` is /run/gpumem there. A command with `launcher` in front of it runs there.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.run.mkdir()
        self._processes: list[subprocess.Popen[str]] = []
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", _PREPARE],
            stdout=subprocess.PIPE,
            text=True,
            env={
                "PATH": os.environ["PATH"],
                "run": str(self.run),
                "scripts": str(SCRIPTS),
                "configuration": str(Path(__file__).with_name("slurm.conf")),
                "python": python,
                "exporter_path": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "client"))),
            },
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "the namespace could not be prepared"
        self._namespace = Path(f"/proc/{self._holder.pid}/ns/mnt").readlink()
        self.root = Path(f"/proc/{self._holder.pid}/root")
        """The root folder of the namespace, as seen from outside."""
        self.launcher = (
            "nsenter",
            f"--mount=/proc/{self._holder.pid}/ns/mnt",
            f"--net=/proc/{self._holder.pid}/ns/net",
        )
        try:
            self._start()
        except BaseException as error:
            self.close()
            raise AssertionError(f"Slurm did not start: {error}\n{self.logs()}") from error

    def _start(self) -> None:
        for name, options in _DAEMONS.items():
            with (self.folder / f"{name}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen([*self.launcher, _path(name), *options], stdout=log, stderr=log, text=True)
                )
            if name == "munged":
                self._wait_for_daemons((self.root / "run/munge/munge.socket.2").exists, "munged")
        self._wait_for_daemons(lambda: self.node_state() == "idle", "the node to be idle")

    def _wait_for_daemons(self, condition: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            assert all(process.poll() is None for process in self._processes), "a daemon has exited"
            return condition()

        wait_for(reached, what)

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command there until it exits."""
        return subprocess.run(
            [*self.launcher, *words],
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
            env=None if environment is None else dict(environment),
        )

    def node_state(self) -> str:
        """Return the node's state: idle, allocated, completing, drained and others."""
        return self.command("sinfo", "--noheader", "--format=%T").stdout.strip()

    def submit(self, script: Path, *options: str, environment: Mapping[str, str]) -> str:
        """Submit a batch script and return the job's id."""
        done = self.command("sbatch", "--parsable", *options, str(script), environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait_for_end(self, job: str) -> str:
        """Wait until the job and its Epilog have ended, and return the job's state."""

        def ended() -> str:
            fields = dict(
                field.partition("=")[::2] for field in self.command("scontrol", "show", "job", job).stdout.split()
            )
            state = fields.get("JobState", "")
            return state if state not in ("", "PENDING", "RUNNING", "COMPLETING") else ""

        state = wait_for(ended, f"the end of job {job}", 120)
        wait_for(lambda: self.node_state() not in ("allocated", "completing", "mixed"), "the end of the Epilog")
        return state

    def logs(self) -> str:
        """Return the logs of the daemons."""
        return "\n".join(
            f"{name}:\n{log.read_text()}" for name in _DAEMONS if (log := self.folder / f"{name}.log").exists()
        )

    def close(self) -> None:
        """Kill every process in the namespace, which also ends the namespace."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended
                if (process / "ns/mnt").readlink() == self._namespace:
                    os.kill(int(process.name), signal.SIGKILL)
        for child in (*self._processes, self._holder):
            child.wait(patient(30))
        assert self._holder.stdout is not None
        self._holder.stdout.close()


def _path(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert found, program
    return found


def missing_programs() -> list[str]:
    """Return the programs that are not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]
