"""Partitions as tasks of Ray on two nodes, of which one is killed, give the shards of a single build."""

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import LIMIT_S, Forked
from programs import refusal, run, snapshot

ray_cluster: Any = pytest.importorskip("ray.cluster_utils")
pytestmark = pytest.mark.timeout(1200)
FILES, PARTITIONS = 1000, 6


@pytest.fixture
def cluster() -> Iterator[Any]:
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    draws = random.Random(0)
    (tmp_path / "corpus").mkdir()
    for number in range(FILES):
        texts = [" ".join(draws.choices(["one", "of", "five", "short", "words"], k=300)) for _ in range(24)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"corpus/{number}.jsonl").write_text(rows)
    (tmp_path / "words.toml").write_text(
        '[corpus]\nsource = "corpus"\n[tokenizer]\npath = "tokenizer.model"\nvocab_size = 300\n'
        'sample_bytes = 100_000\n[shards]\nfolder = "shards"\n'
    )
    run("tost prepare tokenizer", tmp_path / "words.toml", cwd=tmp_path)
    return tmp_path / "words.toml"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_node_and_a_killed_command_lose_nothing(config: Path, cluster: Any, tmp_path: Path):
    run("tost prepare shards", config, "shards.folder=whole", cwd=tmp_path)
    second, parts = cluster.add_node(num_cpus=1), tmp_path / "shards.partitions"
    words = (config, "shards.engine=ray", f"shards.partitions={PARTITIONS}")

    killed = Forked("tost prepare shards", *words, cwd=tmp_path, RAY_ADDRESS=cluster.address)
    until(lambda: len(list(parts.glob("[0-9]*"))) > 0)
    killed.send_signal(signal.SIGKILL)
    killed.finish()
    finished = {path.name: path.stat().st_ino for path in parts.glob("[0-9]*")}
    assert finished

    resumed = Forked("tost prepare shards", *words, cwd=tmp_path, RAY_ADDRESS=cluster.address)
    until(lambda: len(list(parts.glob(".*.building/journal.json"))) == 2)  # a task on each node
    cluster.remove_node(second, allow_graceful=False)
    code, _, errors = resumed.finish(900.0)
    assert code == 0, errors
    assert snapshot(tmp_path / "shards") == snapshot(tmp_path / "whole")
    assert finished.items() <= {path.name: path.stat().st_ino for path in parts.iterdir()}.items()


def test_an_error_of_a_task_and_a_wrong_address_are_one_line(config: Path, cluster: Any, tmp_path: Path):
    (tmp_path / "corpus/2.jsonl").write_text("{\n" * 1000)
    words = (config, "shards.engine=ray", f"shards.partitions={PARTITIONS}", "tokenizer.vocab_size=none")
    refused = refusal("tost prepare shards", *words, cwd=tmp_path, RAY_ADDRESS=cluster.address)
    assert re.match(r"corpus/2\.jsonl, line \d+: not JSON: ", refused)
    assert refused.count("\n") == 0
    refused = refusal("tost prepare shards", *words, cwd=tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert refused.startswith("RAY_ADDRESS 127.0.0.1:1: ")
