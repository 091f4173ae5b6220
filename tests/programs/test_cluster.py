"""configs/cluster: the launcher on two hosts, its error messages, the hostfile, and the Slurm script."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from forked import CHECKOUT, ENVIRONMENT, LIMIT_S, free_port, wait_until
from programs import curve, linked, run
from two_hosts import INTERFACE, two_hosts

import tost_lm
from tost_lm.parallel.watchdog import read_heartbeats

CLUSTER = CHECKOUT / "configs/cluster"
LAUNCH = str(CLUSTER / "launch.sh")
JOB = {"NODES", "NODE_RANK", "SLURM_NODEID", "RANKS_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "INTERFACE", "PROGRAM"}
ACTIVATED = {
    **{name: value for name, value in ENVIRONMENT.items() if name not in JOB},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
NODE = {"NODES": "2", "NODE_RANK": "1", "RANKS_PER_NODE": "2", "MASTER_ADDR": "node-0"}


def exit_codes(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all have ended, one has failed, or two minutes have passed; None for running processes."""
    deadline = time.monotonic() + 120
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


@pytest.fixture(scope="module")
def one_host(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks on one host."""
    folder = linked(prepared, tmp_path_factory.mktemp("one_host"))
    run("tost_lm.pretrain.commands.train", "run.toml", cwd=folder, ranks=2)
    return folder


@pytest.mark.slow
def test_deepspeeds_launcher_starts_the_ranks_of_the_hostfile(workplace: Path, one_host: Path):
    nodes = ["--hostfile", str(CLUSTER / "hostfile"), "--include", "node-0:0,1", "--no_ssh", "--node_rank", "0"]
    master = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    program = ["--no_local_rank", "--module", "tost_lm.pretrain.commands.train", "run.toml"]  # as in docs/cluster.md
    launched = subprocess.run(
        ["deepspeed", *nodes, *master, *program], cwd=workplace, env=ACTIVATED, capture_output=True, text=True
    )
    assert launched.returncode == 0, launched.stderr
    assert json.loads((workplace / "runs/tiny/env.json").read_text())["world_size"] == 2
    assert curve(workplace) == curve(one_host)


@pytest.mark.quick
def test_two_hosts_train_as_one_and_communicate_over_their_network(workplace: Path, one_host: Path):
    logs = [workplace / "host0.txt", workplace / "host1.txt"]
    with two_hosts() as hosts:
        job = {"NODES": "2", "RANKS_PER_NODE": "1", "MASTER_ADDR": hosts[0].address, "INTERFACE": INTERFACE}
        ranks = [{"NODE_RANK": "0"}, {"SLURM_NODEID": "1"}]
        launched = [
            host.start([LAUNCH, "run.toml"], log, cwd=workplace, environment={**ACTIVATED, **job, **rank})
            for host, log, rank in zip(hosts, logs, ranks, strict=True)
        ]
        codes = exit_codes(launched)
        received = [host.bytes_received() for host in hosts]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    assert json.loads((workplace / "runs/tiny/env.json").read_text())["world_size"] == 2
    assert [step for step, *_ in curve(workplace)] == list(range(1, 13))
    assert curve(workplace) == curve(one_host)
    # In each of 12 steps a host receives half of the gradients and half of the updated weights.
    assert min(received) > 12 * 4 * tost_lm.load(workplace / "runs/tiny").parameter_count()


@contextmanager
def two_nodes(*words: str, cwd: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of two nodes with one rank each, on this host; their stderr is a pipe."""
    job = {**ACTIVATED, **NODE, "RANKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job["LOST_RANK_FILE"] = str(cwd / "lost")
    launchers = [
        subprocess.Popen(
            [LAUNCH, *words], cwd=cwd, env=job | {"NODE_RANK": str(node)}, stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    try:
        yield launchers
    finally:
        for launcher in launchers:
            for process in psutil.Process(launcher.pid).children() if launcher.poll() is None else []:
                process.kill()
            launcher.kill()


def ends(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    errors = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
    return [(launcher.returncode, text) for launcher, text in zip(launchers, errors, strict=True)]


@pytest.mark.slow
def test_a_killed_rank_of_two_nodes_leaves_one_line_on_each(workplace: Path):
    with two_nodes("run.toml", "train.steps=100000", "run.timeout_seconds=20", cwd=workplace) as launchers:
        beats = lambda: read_heartbeats(workplace / "runs/tiny/heartbeats")
        wait_until(lambda: len(beats()) == 2 and beats()[1].step > 2, *launchers)
        os.kill(pid := beats()[1].pid, signal.SIGKILL)
        (code, error), killed = ends(launchers)
    assert code == 2
    assert re.fullmatch(rf"error: rank 1 \(.*, pid {pid}\) was lost: .*\n", error)
    assert killed == (2, "error: rank 1 was ended by SIGKILL; run the same command to resume\n")
    assert (workplace / "lost").exists()


@pytest.mark.slow
def test_a_port_in_use_is_one_line():
    with socket.create_server(("", 0)) as used:
        port = str(used.getsockname()[1])
        node = {**ACTIVATED, **NODE, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launched = subprocess.run([LAUNCH, "x.toml"], env=node, capture_output=True, text=True)
    assert launched.returncode == 2
    line = rf"error: MASTER_ADDR=127.0.0.1 MASTER_PORT={port}, .*address already in use; .*\n"
    assert re.fullmatch(line, launched.stderr)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"NODES": ""}, "NODES is not set; set it to the number of nodes"),
        ({"NODES": "two"}, "NODES=two: not an integer from 1 to 99999; set it to the number of nodes"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2: not an integer from 0 to 1; set it to the number of this node"),
        (
            {"MASTER_PORT": "65536"},
            "MASTER_PORT=65536: not an integer from 1 to 65535; set it to the number ",
        ),
        ({"INTERFACE": "none0"}, "INTERFACE=none0: this node has no such network interface; choose one of "),
    ],
)
def test_missing_or_wrong_variables_get_one_error_line(changed: dict[str, str], error: str):
    launched = subprocess.run([LAUNCH, "x.toml"], env={**ACTIVATED, **NODE, **changed}, capture_output=True, text=True)
    assert launched.returncode == 2
    assert launched.stderr.startswith(f"error: {error}")
    assert launched.stderr.count("\n") == 1


def test_without_the_environment_the_launcher_asks_to_activate_it(tmp_path: Path):
    (tmp_path / "bash").symlink_to("/bin/bash")
    environment = {**ACTIVATED, **NODE, "PATH": str(tmp_path)}
    launched = subprocess.run([LAUNCH, "x.toml"], env=environment, capture_output=True, text=True)
    assert launched.returncode == 2
    error = "python: not found, or without tost_lm; activate the environment: . .venv/bin/activate"
    assert launched.stderr == f"error: {error}\n"


def test_the_slurm_script_finds_the_launcher_of_a_checkout_and_a_copied_one(tmp_path: Path):
    (tmp_path / "launch.sh").touch()
    (find,) = [line for line in (CLUSTER / "train.sbatch").read_text().splitlines() if line.startswith("export LAUNCH")]
    for folder, found in ((CHECKOUT, "configs/cluster/launch.sh"), (tmp_path, "./launch.sh")):
        shown = subprocess.run(["bash", "-c", f"{find}\necho $LAUNCH"], cwd=folder, capture_output=True, text=True)
        assert shown.stdout == f"{found}\n"


def test_the_slurm_script_without_a_launcher_ends_with_one_line(tmp_path: Path):
    job = {**ACTIVATED, "SLURM_SUBMIT_DIR": str(tmp_path)}
    ended = subprocess.run(["bash", str(CLUSTER / "train.sbatch"), "demo"], env=job, capture_output=True, text=True)
    problem = "neither configs/cluster/launch.sh nor launch.sh; run there: tost recipes copy launch.sh"
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"error: {tmp_path}: {problem}\n"
