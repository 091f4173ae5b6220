"""pretrain.preflight as a user runs it: what it says of ranks in order, and of a node that is not like the others."""

import shutil
import socket
from pathlib import Path

import psutil
import pytest
from forked import Forked, as_rank, free_port
from programs import refusal, run, snapshot

from tost_lm.data.shard_format import read_manifest
from tost_lm.errors import ConfigError
from tost_lm.files import manifest_bytes
from tost_lm.parallel.preflight import network_in_use, slow_links

HOST = socket.gethostname()
IPV4 = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET
]


def start_nodes(*nodes: tuple[Path, list[str]], program: str = "pretrain.preflight") -> list[Forked]:
    """Nodes with one rank each, by folder and words, as torchrun starts them."""
    port = free_port()
    return [
        Forked(program, "run.toml", *words, cwd=cwd, **as_rank(number, len(nodes), port, ranks_per_node=1))
        for number, (cwd, words) in enumerate(nodes)
    ]


def test_ranks_in_order_are_a_row_and_ok_and_nothing_is_left(workplace: Path):
    before = snapshot(workplace)
    heading, row, speed, *rest = run("pretrain.preflight", "run.toml", cwd=workplace, ranks=2).splitlines()
    assert heading.split() == ["node", "ranks", "devices", "disk", "free", "network", "slowest", "link", "in", "out"]
    assert row.startswith(f"0 {HOST}  0-1    2 × cpu  ")
    assert all(float(bandwidth) > 0 for bandwidth in row.replace(" GB/s", "").split()[-2:])
    assert speed.startswith("all_reduce over all ranks: ")
    assert rest[-1] == "ok"
    assert all(line.startswith("warning: ") for line in rest[:-1])  # on a machine that is busy
    assert snapshot(workplace) == before


def test_training_with_other_settings_on_a_node_ends_on_both_before_it_begins(workplace: Path):
    words = ["optim.lr=2e-2", "run.log_every=3"]
    for node in start_nodes((workplace, []), (workplace, words), program="pretrain.train"):
        code, _, errors = node.finish()
        said = [line.partition(":")[2] for line in errors.splitlines() if line.startswith("error: ")]
        assert code
        assert len(said) == 2
        assert said[0].startswith(f" rank 1 ({HOST}): optim.lr is 0.02 where rank 0 has 0.01: ")
        assert said[1].startswith(f" rank 1 ({HOST}): run.log_every is 3 where rank 0 has 1: ")
    assert not (workplace / "runs").exists()


def test_a_node_with_other_settings_shards_and_disk_is_named_for_each(workplace: Path, tmp_path_factory):
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
    odd = f"error: rank 1 ({HOST}): "
    assert sharing.startswith(f"{odd}{other}/runs is not the folder of rank 0: ")
    assert settings.startswith(f"{odd}optim.lr is 0.02 where rank 0 has 0.01: ")
    assert shards.startswith(f"{odd}the fingerprint of out/shards is ")
    assert "ok" not in table.splitlines()
    assert "optim.lr is 0.02" in other_errors


def test_a_full_disk_and_missing_shards_are_a_line_each(workplace: Path):
    words = ["run.toml", "checkpoint.keep=1000000000", "data.folder=nowhere"]
    disk, shards = refusal("pretrain.preflight", *words, cwd=workplace).splitlines()
    assert disk.startswith(f"rank 0 ({HOST}): runs has ")
    # 12,692 parameters of 12 bytes
    assert " GB less than the 152,304.00 GB that the run's checkpoints take: " in disk
    assert shards.startswith(f"rank 0 ({HOST}): nowhere: not a shard folder; ")


def test_the_network_in_use_is_the_one_named_and_reachable(monkeypatch: pytest.MonkeyPatch):
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
        with pytest.raises(ConfigError, match=f"where other nodes do not reach it: set GLOO_SOCKET_IFNAME={name}"):
            network_in_use("gloo")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert network_in_use("gloo") == f"{name} {address}"


@pytest.mark.parametrize(
    ("nodes", "bandwidths", "named"),
    [
        ("0", [0.0], []),
        ("0000", [9, 8, 5, 9], []),
        ("0000", [9, 9, 9, 1], ["rank 3 (h0): 1.00 GB/s from rank 2 (h0)"]),
        ("012", [2, 0.1, 0.2], ["rank 1 (h1): 0.20 GB/s at best with its neighbours"]),
        ("012", [2, 2, 0.1], ["rank 2 (h2): 0.10 GB/s from rank 1 (h1)"]),
        ("00112233", [5, 90, 5, 90, 5, 90, 5, 90], []),
        ("00112233", [5, 90, 5, 90, 1, 90, 1, 90], ["ranks 4-5 (h2): 1.00 GB/s at best with its neighbours"]),
    ],
)
def test_slow_is_measured_against_links_of_the_same_kind(nodes: str, bandwidths: list[float], named: list[str]):
    ranks = [{"host": f"h{n}", "node": n, "bandwidth": b * 1e9} for n, b in zip(nodes, bandwidths, strict=True)]
    assert [line.partition(", ")[0] for line in slow_links(ranks)] == named
