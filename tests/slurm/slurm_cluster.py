"""A Slurm cluster on this machine: a controller and four nodes, each in a network namespace with a
host name of its own.

It needs root, iproute2 and Debian's slurm-wlm (22.05). Ports, names and files are its own, so it
disturbs no Slurm that runs on the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import network_hosts
from tests.network_hosts import NetworkHosts, build_path

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONTROLLER = "ctl"
CPU_NODES = ("cpu0", "cpu1")
GPU_NODES = ("gpu0", "gpu1")
GPUS_PER_NODE = 2
_ADDRESSES = {CONTROLLER: "10.95.3.254"} | {
    name: f"10.95.3.{number}" for number, name in enumerate((*CPU_NODES, *GPU_NODES), start=1)
}
_FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE")


def find_obstacle() -> str | None:
    """Return why no cluster can start here; None if one can."""
    missing = [name for name in COMMANDS if shutil.which(name, path=build_path()) is None]
    if missing:
        return f"Slurm is absent ({', '.join(missing)}): make slurm-packages"
    return network_hosts.find_obstacle()


@dataclass(frozen=True)
class JobState:
    """State of a job as `scontrol show job` reports it."""

    state: str
    exit_code: int
    restarts: int
    reason: str


@dataclass
class SlurmCluster:
    """Controller and nodes; commands run on the controller's host."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def hosts(self) -> NetworkHosts:
        """Hosts of the controller and the nodes."""
        return NetworkHosts(self.folder, _ADDRESSES, CONTROLLER)

    def start(self) -> None:
        """Create the namespaces and start the daemons; return when all nodes are idle.

        Raises:
            RuntimeError: the namespaces cannot be created.
        """
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        self._write_configuration()
        self.hosts.create()
        self.start_daemon(CONTROLLER)
        for node in (*CPU_NODES, *GPU_NODES):
            self.start_daemon(node)
        nodes = len(CPU_NODES) + len(GPU_NODES)
        wait_until(lambda: self._count_idle_nodes() == nodes, 60, self._read_logs)

    def stop(self) -> None:
        """End every process of the cluster and remove its namespaces."""
        for name in reversed(list(self.daemons)):
            self.kill_node(name)
        self.hosts.delete()

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Run a command on the controller's host; return its output."""
        completed = subprocess.run(
            self.hosts.build_command(CONTROLLER, *command),
            capture_output=True,
            text=True,
            env=self._build_environment() | dict(environment or {}),
            cwd=cwd or self.folder,
            check=False,
        )
        if completed.returncode:
            raise RuntimeError(f"{' '.join(command)}: {completed.stderr}\n{self._read_logs()}")
        return completed.stdout

    def start_daemon(self, name: str) -> None:
        """Start a node's slurmd, or slurmctld on the controller."""
        configuration = ["-D", "-f", str(self.folder / "slurm.conf")]
        command = (
            ["slurmctld", *configuration]
            if name == CONTROLLER
            else ["slurmd", "-N", name, *configuration]
        )
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                self.hosts.build_command(name, *command),
                stdout=log,
                stderr=log,
                env=self._build_environment(),
                start_new_session=True,
            )

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a power failure does."""
        self.hosts.kill(name)
        self.daemons[name].wait()

    def kill_rank(self, job: str, rank: int) -> None:
        """Kill the process of a rank, which its environment tells from other processes."""
        words = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if words <= set((process / "environ").read_bytes().split(b"\0")):
                    os.kill(int(process.name), signal.SIGKILL)

    def read_job(self, job: str) -> JobState:
        """Read a job's state."""
        text = self.run("scontrol", "show", "job", "--oneliner", job)
        values = dict(
            word.split("=", 1) for word in text.split() if "=" in word and word[0].isupper()
        )
        return JobState(
            values["JobState"],
            int(values["ExitCode"].partition(":")[0]),
            int(values["Restarts"]),
            values["Reason"],
        )

    def start_soon(self, job: str) -> None:
        """Start a requeued job in a few seconds: Slurm delays it for two minutes.

        Without any delay, the end of the former script is taken for that of the new one.
        """
        time.sleep(5)
        with suppress(RuntimeError):  # it has started meanwhile
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_for_job(self, job: str, seconds: float, *, is_hurried: bool = True) -> JobState:
        """Wait until a job has ended, not to be requeued, and return its last state.

        Args:
            is_hurried: Start it soon whenever it is requeued.
        """

        def has_ended() -> bool:
            state = self.read_job(job)
            if is_hurried and state.state == "PENDING" and state.reason == "BeginTime":
                self.start_soon(job)
            return state.state in _FINAL_STATES

        wait_until(has_ended, seconds, lambda: f"{self.read_job(job)}\n{self._read_logs()}")
        return self.read_job(job)

    def _write_configuration(self) -> None:
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{CONTROLLER}({_ADDRESSES[CONTROLLER]})",
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool" / "%n",
            "SlurmctldPidFile": self.folder / "ctl.pid",
            "SlurmdPidFile": self.folder / "%n.pid",
            "SlurmctldLogFile": self.folder / "log" / "ctl.log",
            "SlurmdLogFile": self.folder / "log" / "%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,bf_interval=1",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "GresTypes": "gpu",
            "ReturnToService": 2,
            "SlurmdTimeout": 10,
            "KillWait": 30,
            "SlurmdParameters": "config_overrides",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        gpus = []
        for name in (*CPU_NODES, *GPU_NODES):
            has_gpus = name in GPU_NODES
            lines.append(
                f"NodeName={name} NodeAddr={_ADDRESSES[name]} CPUs=4 RealMemory=2000"
                + (f" Gres=gpu:{GPUS_PER_NODE}" if has_gpus else "")
            )
            if has_gpus:
                for number in range(GPUS_PER_NODE):
                    device = self.folder / f"{name}-device{number}"
                    device.touch()
                    gpus.append(f"NodeName={name} Name=gpu File={device}")
        lines += [
            f"PartitionName=cpu Nodes={','.join(CPU_NODES)} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=gpu Nodes={','.join(GPU_NODES)} MaxTime=INFINITE State=UP",
            "PartitionName=all Nodes=ALL MaxTime=INFINITE State=UP",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(gpus) + "\n")

    def _build_environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": build_path(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    def _count_idle_nodes(self) -> int:
        try:
            # A node is listed once for each of its partitions.
            return len(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()))
        except RuntimeError:
            return 0  # the controller does not answer yet

    def _read_logs(self) -> str:
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)


def wait_until(
    condition: Callable[[], bool], seconds: float, describe: Callable[[], str] | None = None
) -> None:
    """Wait for a condition; fail after `seconds` with what `describe` returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s: {describe() if describe else ''}"
        time.sleep(0.2)
