"""`tost preflight` as a user runs it: its output for equal nodes, and its errors for a node that differs."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forked import CHECKOUT, ENVIRONMENT, LIMIT_S, Forked, as_rank, free_port, module_of
from programs import refusal, run, snapshot

from tost_lm.data.shard_format import read_manifest
from tost_lm.errors import ConfigError
from tost_lm.files import manifest_bytes
from tost_lm.parallel.preflight import network_in_use
from tost_lm.version import code_sha256

HOST = socket.gethostname()
IPV4 = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET
]


def start_nodes(*nodes: tuple[Path, list[str]], program: str = "tost preflight") -> list[Forked]:
    """Start nodes with one rank each, as torchrun does, from their folders and arguments."""
    port = free_port()
    return [
        Forked(program, "run.toml", *words, cwd=cwd, **as_rank(number, len(nodes), port, ranks_per_node=1))
        for number, (cwd, words) in enumerate(nodes)
    ]


def test_equal_ranks_print_a_row_and_ok_and_leave_no_files(workplace: Path):
    before = snapshot(workplace)
    heading, row, speed, ok = run("tost preflight", "run.toml", cwd=workplace, ranks=2).splitlines()
    assert heading.split() == ["node", "ranks", "devices", "disk", "free", "network"]
    assert row.startswith(f"0 {HOST}  0-1    2 × cpu  ")
    assert speed.startswith("all_reduce over all ranks: ")
    assert ok == "ok"
    assert snapshot(workplace) == before


@pytest.mark.quick
def test_training_with_different_settings_on_one_node_is_refused_on_both(workplace: Path):
    words = ["optim.lr=2e-2", "run.log_interval=3"]
    for node in start_nodes((workplace, []), (workplace, words), program="tost train"):
        code, _, errors = node.finish()
        rate, log_interval = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code
        assert rate.startswith(f"error: optim.lr differs between ranks: 0.02 on rank 1 ({HOST}), 0.01 on rank 0; ")
        assert log_interval.startswith(
            f"error: run.log_interval differs between ranks: 3 on rank 1 ({HOST}), 1 on rank 0; "
        )
    assert not (workplace / "runs").exists()


@pytest.mark.slow
def test_nodes_with_different_code_are_refused(workplace: Path, tmp_path_factory):
    """The package of the second node differs in one line."""
    package = tmp_path_factory.mktemp("other") / "tost_lm"
    shutil.copytree(CHECKOUT / "tost_lm", package, ignore=shutil.ignore_patterns("recipes"))
    (package / "recipes").symlink_to(CHECKOUT / "configs")
    with (package / "ops/cross_entropy.py").open("a") as file:
        file.write("# another line\n")
    port = free_port()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", *module_of("tost preflight", ["run.toml"])],
            cwd=workplace,
            env={**ENVIRONMENT, "PYTHONPATH": str(path), **as_rank(number, 2, port, ranks_per_node=1)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, path in enumerate((CHECKOUT, package.parent))
    ]
    for node in nodes:
        errors = node.communicate(timeout=LIMIT_S)[1]
        assert node.returncode == 2
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: the code of tost_lm differs between ranks: ")
        assert f" on rank 1 ({HOST}), {code_sha256()[:16]} on rank 0; " in line
    assert not (workplace / "runs").exists()


def test_a_node_with_different_settings_shards_and_disk_gets_a_line_for_each(workplace: Path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copy(workplace / "run.toml", other)
    shutil.copytree(workplace / "out/shards", other / "out/shards")
    manifest = read_manifest(other / "out/shards")
    manifest["splits"]["train"]["bytes"] += 1
    (other / "out/shards/manifest.json").write_bytes(manifest_bytes(manifest))
    nodes = start_nodes((workplace, []), (other, ["optim.lr=2e-2"]))
    (code, table, errors), (other_code, _, other_errors) = [node.finish() for node in nodes]
    assert code
    assert other_code
    assert [line.split()[:3] for line in table.splitlines()[1:3]] == [["0", HOST, "0"], ["1", HOST, "1"]]
    sharing, settings, shards = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert sharing.startswith(f"error: rank 1 ({HOST}): {other}/runs is not the folder of rank 0; ")
    assert settings.startswith(f"error: optim.lr differs between ranks: 0.02 on rank 1 ({HOST}), 0.01 on rank 0; ")
    assert shards.startswith("error: the fingerprint of out/shards differs between ranks: ")
    assert "ok" not in table.splitlines()
    assert "optim.lr differs between ranks" in other_errors


def test_a_full_disk_and_missing_shards_are_a_line_each(workplace: Path):
    many = ["train.steps=1000000000", "checkpoint.interval=1", "checkpoint.keep_latest_k=1000000000"]
    words = ["run.toml", *many, "data.folder=nowhere"]
    shards, disk = refusal("tost preflight", *words, cwd=workplace).splitlines()
    # 12,692 parameters of 12 bytes
    assert ": saving 1000000000 more checkpoints needs 152,304,000,000,000 bytes, and its disk has " in disk
    assert shards.startswith(f"rank 0 ({HOST}): nowhere: not a shard folder; ")


def test_the_network_interface_follows_the_setting_and_must_be_reachable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ConfigError, match=f"GLOO_SOCKET_IFNAME=nosuch0: {HOST} has no such interface"):
        network_in_use("gloo")
    loopback, *others = sorted(IPV4, key=lambda interface: not interface[1].startswith("127."))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback[0])
    assert network_in_use("gloo") == " ".join(loopback)
    if others:
        name, address = others[0]
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", address)
        with pytest.raises(ConfigError, match=f"which other nodes cannot reach; set GLOO_SOCKET_IFNAME={name}"):
            network_in_use("gloo")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert network_in_use("gloo") == f"{name} {address}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("train.seq_len = 10000000", "train.seq_len 10000000: the train split of out/shards has only "),
        (
            "validation.interval = 1\ntrain.seq_len = 65536",
            "train.seq_len 65536: the valid split of out/shards has only ",
        ),
        ('evaluation = { interval = 1, tasks = ["nedle"] }', "nedle"),
        ('evaluation = { interval = 1, tasks = ["text"] }', "text.file"),
        (
            'evaluation = { interval = 1, tasks = ["needle"], settings = { needle = { samples = inf } } }',
            "evaluation: needle.samples: input should be a valid integer, got inf",
        ),
    ],
)
def test_mistakes_of_a_later_stage_are_reported_at_the_start(workplace: Path, changes: str, problem: str):
    with (workplace / "run.toml").open("a") as recipe:
        recipe.write(f'[[stages]]\nname = "later"\nfrom_step = 6\n{changes}\n')
    model = ["model.positions=none", "model.pattern=D"]  # reads texts of any length
    at_preflight, at_start = (
        refusal(f"tost {program}", "run.toml", *model, cwd=workplace) for program in ("preflight", "train")
    )
    assert at_start.startswith("stage later: ")
    assert problem in at_start
    assert at_preflight.endswith(at_start)
    assert not (workplace / "runs").exists()
