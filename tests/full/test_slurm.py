"""The Slurm script as it is installed, on two nodes of a real Slurm: stops, lost ranks, requeues and resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ENVIRONMENT
from programs import run, write_tiny_run
from slurm_nodes import NODES, SlurmNodes, slurm_nodes

from tost_lm.parallel.watchdog import HeartbeatRecord, read_heartbeats

pytestmark = pytest.mark.timeout(3600)
LIMIT_S = 300
OPTIONS = ("--cpus-per-task=1", "--gpus-per-node=1")
LONG = ("run.timeout_seconds=10", "train.steps=1000000")


class Job:
    """A job of the script in a folder with run.toml."""

    def __init__(self, nodes: SlurmNodes, folder: Path, *words: str, **environment: str) -> None:
        options = [word for word in words if word.startswith("--")]
        settings = [word for word in words if word not in options]
        command = ["sbatch", "--parsable", *OPTIONS, *options, "train.sbatch", "run.toml", *settings]
        self._nodes, self._folder = nodes, folder
        self._seen, self._newest = set[int](), newest_step(folder)
        self.id = subprocess.check_output(
            command, cwd=folder, env={**nodes.environment, **environment}, text=True
        ).strip()

    def __getitem__(self, name: str) -> str:
        """A value that Slurm shows, such as JobState."""
        shown = self._nodes.call("scontrol", "show", "job", "--oneliner", self.id)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    def output(self) -> str:
        """The log of all attempts."""
        log = self._folder / f"slurm-{self.id}.out"
        return log.read_text() if log.exists() else ""

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition()` is true."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{self['JobState']}\n{self.output()}"
            time.sleep(0.1)

    def has_saved(self) -> dict[int, HeartbeatRecord]:
        """The ranks' heartbeats, once the next attempt has saved a checkpoint."""
        beats = dict[int, HeartbeatRecord]()

        def has_saved() -> bool:
            beats.update(read_heartbeats(self._folder / "runs/tiny/heartbeats"))
            is_new = len(beats) == 2 and not any(beat.pid in self._seen for beat in beats.values())
            return is_new and newest_step(self._folder) > self._newest

        self.until(has_saved)
        self._seen.update(beat.pid for beat in beats.values())
        self._newest = newest_step(self._folder)
        return beats

    def end(self) -> tuple[str, int, int]:
        """State, exit code and number of requeues."""
        self.until(lambda: self["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"))
        return self["JobState"], int(self["ExitCode"].split(":")[0]), int(self["Restarts"])

    def resumed(self) -> list[int]:
        """The steps that its attempts resumed from."""
        return [int(step) for step in re.findall(r"resuming from runs/tiny/checkpoints/step_(\d+)", self.output())]


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max((int(path.name[5:]) for path in (folder / "runs/tiny/checkpoints").glob("step_*")), default=0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with slurm_nodes(tmp_path_factory.mktemp("slurm"), {**ENVIRONMENT, "PATH": path, "INTERFACE": "lo"}) as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a tiny run and the copied script."""
    write_tiny_run(tmp_path)
    run("tost recipes", "copy", "train.sbatch", cwd=tmp_path)
    return tmp_path


def assert_every_step_is_saved(folder: Path) -> None:
    """A graceful stop has lost no step."""
    rows = (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == newest_step(folder)


def test_a_stopped_job_is_not_requeued_and_the_next_one_resumes_on_one_node(nodes: SlurmNodes, workplace: Path):
    stopped = Job(nodes, workplace, *LONG)
    stopped.has_saved()
    nodes.call("scancel", "--signal=TERM", stopped.id)
    assert stopped.end() == ("FAILED", 75, 0), stopped.output()
    assert_every_step_is_saved(workplace)
    step = newest_step(workplace)
    last = Job(nodes, workplace, *LONG, f"run.stop_at_step={step + 9}", "--nodes=1")
    assert last.end() == ("COMPLETED", 0, 0), last.output()
    assert "1 rank on cpu" in last.output()
    assert last.resumed() == [step]


def test_a_job_that_loses_a_rank_is_requeued_so_often_and_resumes(nodes: SlurmNodes, workplace: Path):
    job, newest = Job(nodes, workplace, *LONG, MAX_RESTARTS="2"), []
    for signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        beats = job.has_saved()
        newest.append(newest_step(workplace))
        os.kill(beats[1].pid, signum)
    assert job.end() == ("FAILED", 2, 2), job.output()
    assert all(step >= saved for step, saved in zip(job.resumed(), newest[:2], strict=True)), job.output()
    assert len(re.findall(r"^error: rank 1 \(.*\) was lost: ", job.output(), re.MULTILINE)) == 3
    assert job.output().endswith(
        "error: a rank was lost after 2 restarts (MAX_RESTARTS); check its node, then submit the job again\n"
    )
    assert not re.search("Traceback|torch", job.output()), job.output()


@pytest.mark.parametrize("node", NODES)  # the batch script runs on the first one
def test_a_job_of_a_crashed_node_is_requeued_and_resumes(nodes: SlurmNodes, workplace: Path, node: str):
    job = Job(nodes, workplace, *LONG)
    job.has_saved()
    nodes.crash(node)
    newest = newest_step(workplace)
    job.until(lambda: job["Restarts"] == "1")
    nodes.start_node(node)
    job.has_saved()
    assert job.resumed()[0] >= newest
    nodes.call("scancel", job.id)


def test_an_error_of_settings_is_not_requeued(nodes: SlurmNodes, workplace: Path):
    job = Job(nodes, workplace, "data.folder=nowhere")
    assert job.end() == ("FAILED", 2, 0), job.output()
    assert "error: nowhere: " in job.output()


def test_an_error_on_one_node_in_training_is_not_requeued(nodes: SlurmNodes, workplace: Path):
    job = Job(nodes, workplace, *LONG)
    job.has_saved()
    (workplace / "runs/tiny").rename(workplace / "runs/moved")
    assert job.end() == ("FAILED", 2, 0), job.output()
    assert "error: runs/tiny: " in job.output()


def test_a_job_at_its_time_limit_saves_and_ends(nodes: SlurmNodes, workplace: Path):
    job = Job(nodes, workplace, *LONG, "--time=3", "--signal=TERM@60")
    job.has_saved()
    assert job.end() == ("FAILED", 75, 0), job.output()
    assert_every_step_is_saved(workplace)
