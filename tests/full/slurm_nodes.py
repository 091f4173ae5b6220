"""A Slurm cluster of two nodes on this machine: its daemons, with configuration, key and logs in one folder."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from forked import free_port

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of the nodes: addresses, so that ranks can connect to them without an entry in /etc/hosts."""
# A node has one CPU, and a device that Slurm believes to be a GPU. A requeued job waits until its credentials expire,
# two minutes by default.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
KillWait=5
SlurmdTimeout=30
ReturnToService=2
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=2000 Gres=gpu:1
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=2000 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES
"""


class SlurmNodes:
    """The running cluster; `environment` is that of Slurm's commands."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, {**environment, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._daemons = dict[str, psutil.Popen]()

    def call(self, *command: str) -> str:
        """The output of a command of Slurm."""
        return subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True).stdout

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = psutil.Popen(command, env=self.environment, stdout=log, stderr=log)

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def crash(self, node: str) -> None:
        """Kill a node's daemon, then its steps, then their tasks, so that it sends nothing more."""
        named = [process for process in psutil.process_iter() if node_of(process) == node]
        steps = {parent for process in named for parent in process.parents() if parent.name() == "slurmstepd"}
        for process in [self._daemons[node], *steps, *named]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        self.call("scancel", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            daemon.wait()


def node_of(process: psutil.Process) -> str | None:
    """The node that a task of a job runs on."""
    with suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME")
    return None


@contextmanager
def slurm_nodes(folder: Path, environment: Mapping[str, str]) -> Iterator[SlurmNodes]:
    """Start the daemons, and end them. Skips where Slurm is not installed."""
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]:
        pytest.skip(f"two Slurm nodes need {', '.join(missing)} (Debian: slurm-wlm and munge)")
    if os.getuid():
        pytest.skip("two Slurm nodes need root")
    host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, ports=ports))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")  # nothing opens it
    (folder / "munge.key-file").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key-file").chmod(0o600)
    nodes = SlurmNodes(folder, environment)
    files = [f"--{name}={folder}/munge.{name}" for name in ("socket", "key-file", "pid-file", "seed-file", "log-file")]
    try:
        nodes.start("munged", "munged", "--foreground", "--force", *files)
        nodes.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            nodes.start_node(node)
        deadline = time.monotonic() + 60
        while nodes.call("sinfo", "-h", "-o", "%T %D") != "idle 2\n":
            assert time.monotonic() < deadline, "\n".join(log.read_text() for log in folder.glob("*.log"))
            time.sleep(0.2)
        yield nodes
    finally:
        nodes.stop()
