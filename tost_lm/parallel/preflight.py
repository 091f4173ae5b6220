"""What can be wrong between the nodes of a run, looked at on every rank before the first step."""

import contextlib
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from tost_lm.config import Section
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError, DataError
from tost_lm.parallel.agreement import disagreements, gather, name_ranks, rank_numbers, settings_as_facts, wire_device
from tost_lm.parallel.failures import naming_lost_ranks
from tost_lm.parallel.world import start_world, stop_world
from tost_lm.version import VERSION, git_commit

LARGE_BYTES = {"cpu": 2**24, "cuda": 2**28}  # enough to measure bandwidth and not latency
REPETITIONS = 3
LOOPBACK = "127."
OUTSIDE = "192.0.2.1"  # kept for documentation, so what leads there is the default route


class Findings(NamedTuple):
    """The same on every rank."""

    table: str
    """A row for each node, and what an all_reduce over all ranks reaches."""
    problems: list[str]
    """A line for each thing that a run would fail of."""
    warnings: list[str]
    """A line for each rank or node that is slower than the others; machines are noisy."""


def look_at_nodes(
    settings: Section,
    *,
    device: Literal["auto", "cuda", "mps", "cpu"],
    shards_folders: Iterable[Path],
    runs_folder: Path,
    disk_bytes: int,
) -> Findings:
    """Join the process group, look at this rank, compare it with the others, measure the links, leave the group.

    Args:
        settings: what all ranks must have alike.
        runs_folder: must be one folder for all nodes, with `disk_bytes` free; it need not exist.

    Raises:
        ConfigError: there is no such device, or the ranks do not reach each other over the network in use.
        LostRankError: a rank failed on the way.
    """
    host = socket.gethostname()
    network = network_in_use("nccl" if device in ("auto", "cuda") and torch.cuda.is_available() else "gloo")
    try:
        world = start_world(device)
        dist.barrier()  # only now does NCCL connect the ranks
    except RuntimeError as error:
        raise ConfigError(f"{host}: no process group over {network}: {str(error).splitlines()[0]}") from None

    with naming_lost_ranks():
        problems = _problems_of_sharing(runs_folder)
        free_bytes = next(shutil.disk_usage(path).free for path in (runs_folder, *runs_folder.parents) if path.exists())
        if free_bytes < disk_bytes:
            problems.append(
                f"{runs_folder} has {_gb(free_bytes)} free, {_gb(disk_bytes - free_bytes)} less than the "
                f"{_gb(disk_bytes)} that the run's checkpoints take: free that much, or lower checkpoint.keep"
            )
        shards = {}
        for folder in shards_folders:
            try:
                shards[f"the fingerprint of {folder}"] = Shards.open(folder).fingerprint[:16]
            except DataError as error:
                problems.append(str(error))

        bandwidth, latency = measure_all_reduce()
        about_me = {
            "host": host,
            "node": f"{os.environ.get('GROUP_RANK', '0')} {host}",  # as torchrun counts nodes
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else world.device.type,
            "free_bytes": free_bytes,
            "network": network,
            "bandwidth": measure_link(),
            "problems": problems,
        }
        ranks = gather(about_me)
        lines = [
            *_lines_of_problems(ranks),
            *disagreements(settings_as_facts(settings), "start every node with the same file and overrides"),
            *disagreements(shards, "put the same shards on all nodes"),
            *disagreements(_versions(), "put the same on all nodes"),
        ]
        stop_world()
    speed = f"all_reduce over all ranks: {_gb(bandwidth)}/s, {latency * 1e6:.0f} µs for one number"
    return Findings(f"{_table(ranks)}\n{speed}", lines, slow_links(ranks))


def network_in_use(backend: Literal["gloo", "nccl"]) -> str:
    """The interface and address at which this node's ranks are reached: `eth0 10.0.0.2`.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this node, or the loopback
            interface would be taken though there are other nodes.
    """
    host, variable = socket.gethostname(), f"{backend.upper()}_SOCKET_IFNAME"
    interfaces = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    wanted = os.environ.get(variable, "")
    route = _address_towards(os.environ.get("MASTER_ADDR", OUTSIDE))
    if wanted and not wanted.startswith("^"):  # NCCL's sign for all but these
        names = tuple(wanted.removeprefix("=").split(","))
        exactly = backend == "gloo" or wanted.startswith("=")  # else NCCL takes names as prefixes
        fits = (lambda name: name in names) if exactly else (lambda name: name.startswith(names))
        address = next((address for address, name in interfaces.items() if fits(name)), None)
        if not address:
            there = ", ".join(dict.fromkeys(interfaces.values()))
            raise ConfigError(f"{variable}={wanted}: {host} has no such interface; it has {there}")
    else:
        address = _address_of_name(host) if backend == "gloo" else route
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if several and address.startswith(LOOPBACK) and not route.startswith(LOOPBACK):
        raise ConfigError(
            f"{host}: {backend} would listen on {address}, where other nodes do not reach it: "
            f"set {variable}={interfaces.get(route, 'an interface that they reach')}"
        )
    return f"{interfaces.get(address, 'lo')} {address}"


def measure_all_reduce() -> tuple[float, float]:
    """Bytes a second that each rank sends and receives while a large tensor is summed, and seconds for one number.

    All ranks call it.
    """
    size, large, small = dist.get_world_size(), _large_tensor(), torch.zeros(1, device=wire_device())
    seconds = _median_seconds(lambda: dist.all_reduce(large))
    return 2 * (size - 1) / size * large.nbytes / seconds, _median_seconds(lambda: dist.all_reduce(small))


def measure_link() -> float:
    """Bytes a second that this rank receives from the one before it in the ring of all; 0 where it is alone.

    All ranks call it. Links that share a rank take turns: those from even ranks, those from odd ones, and where the
    number of ranks is odd, the one that closes the ring.
    """
    rank, size, large, bandwidth = dist.get_rank(), dist.get_world_size(), _large_tensor(), 0.0
    before, after = (rank - 1) % size, (rank + 1) % size
    turn_of = lambda sender: 2 if size % 2 and sender == size - 1 else sender % 2
    for turn in range(2 + size % 2 if size > 1 else 0):
        if turn_of(rank) == turn:
            _median_seconds(lambda: _transfer(dist.isend, large, after))
        elif turn_of(before) == turn:
            bandwidth = large.nbytes / _median_seconds(lambda: _transfer(dist.irecv, large, before))
        else:
            _median_seconds(lambda: None)
    return bandwidth


def slow_links(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each rank, within nodes, and each node, between them, that has only slow links; then for other ones.

    Slow is less than half of the median that ranks (or nodes) reach on the better of their two links. `ranks` has of
    each rank its host, its node and its bandwidth [bytes/s] from the rank before it in the ring of all.
    """
    hosts, nodes = [rank["host"] for rank in ranks], [rank["node"] for rank in ranks]
    lines = []
    for place in ("within", "between"):
        ends = [(i,) if place == "within" else tuple(_ranks_of(node, ranks)) for i, node in enumerate(nodes)]
        links = [
            (ends[i - 1], ends[i], rank["bandwidth"])
            for i, rank in enumerate(ranks)
            if (nodes[i - 1] == nodes[i]) == (place == "within")
        ]
        best: dict[tuple[int, ...], float] = {}
        for sender, receiver, bandwidth in links:
            best |= {end: max(best.get(end, 0.0), bandwidth) for end in (sender, receiver)}
        usual = statistics.median(best.values()) if best else 0.0
        compared = f"where {_gb(usual)}/s is usual {place} nodes"
        slow = {end: bandwidth for end, bandwidth in best.items() if bandwidth < usual / 2}
        for end, bandwidth in slow.items():
            lines.append(f"{name_ranks(end, hosts)}: {_gb(bandwidth)}/s at best with its neighbours, {compared}")
        for sender, receiver, bandwidth in links:
            if bandwidth < usual / 2 and not {sender, receiver} & slow.keys():
                lines.append(
                    f"{name_ranks(receiver, hosts)}: {_gb(bandwidth)}/s from {name_ranks(sender, hosts)}, {compared}"
                )
    return lines


def _problems_of_sharing(folder: Path) -> list[str]:
    """Rank 0 puts a file into the folder, and every rank looks for it; all ranks call it."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    token, problems = None, []
    with contextlib.ExitStack() as until_all_have_looked:
        if dist.get_rank() == 0:
            try:
                file = until_all_have_looked.enter_context(tempfile.NamedTemporaryFile(dir=there, prefix=".preflight_"))
                token = Path(file.name).name
            except OSError as error:
                problems.append(f"{folder} cannot be written: {error.strerror}")
        token = gather(token)[0]
        if token and not (there / token).exists():
            problems.append(f"{folder.resolve()} is not the folder of rank 0: put it on a disk that all nodes share")
        dist.barrier()
    return problems


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "tost_lm": VERSION}
    for package in ("torch", "deepspeed", "megatron-core", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    versions["commit"] = git_commit() or "unknown"
    if wire_device().type == "cuda":
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    return versions


def _lines_of_problems(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Each problem once, behind the names of the ranks that have it."""
    hosts = [rank["host"] for rank in ranks]
    problems = dict.fromkeys(problem for rank in ranks for problem in rank["problems"])
    having = {problem: [i for i, rank in enumerate(ranks) if problem in rank["problems"]] for problem in problems}
    return [f"{name_ranks(having[problem], hosts)}: {problem}" for problem in problems]


def _table(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [("node", "ranks", "devices", "disk free", "network", "slowest link in", "out")]
    for node in dict.fromkeys(rank["node"] for rank in ranks):
        here = _ranks_of(node, ranks)
        devices = Counter(ranks[i]["device"] for i in here)
        rows.append(
            (
                node,
                rank_numbers(here),
                ", ".join(f"{count} × {device}" for device, count in devices.items()),
                _gb(ranks[here[0]]["free_bytes"]),
                ranks[here[0]]["network"],
                f"{_gb(min(ranks[i]['bandwidth'] for i in here))}/s",
                f"{_gb(min(ranks[(i + 1) % len(ranks)]['bandwidth'] for i in here))}/s",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _ranks_of(node: str, ranks: Sequence[dict[str, Any]]) -> list[int]:
    return [i for i, rank in enumerate(ranks) if rank["node"] == node]


def _median_seconds(action: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(1 + REPETITIONS):
        dist.barrier()
        started = time.perf_counter()
        action()
        if wire_device().type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one connects


def _transfer(direction: Callable[..., Any], tensor: Tensor, peer: int) -> None:
    # A batch of one: for a bare send NCCL would set up a communicator of that pair.
    for work in dist.batch_isend_irecv([dist.P2POp(direction, tensor, peer)]):
        work.wait()


def _large_tensor() -> Tensor:
    device = wire_device()
    return torch.zeros(LARGE_BYTES[device.type] // 4, device=device)


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing, but chooses the route
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _address_of_name(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"  # gloo's own way out


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
