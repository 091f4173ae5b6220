"""Checks of all nodes before a run: versions, settings, shards, disk space, shared folder, network bandwidth."""

import contextlib
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.cuda import nccl

from tost_lm.config import Section
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError, DataError, TostError, first_line
from tost_lm.parallel.agreement import (
    all_gather_object,
    communication_device,
    find_mismatches,
    name_ranks,
    rank_numbers,
    settings_as_facts,
    versions_as_facts,
)
from tost_lm.parallel.mesh import prefer_loopback, start_world, stop_world
from tost_lm.parallel.watchdog import watch_ranks

LARGE_BYTES = {"cpu": 2**24, "cuda": 2**28}  # large enough to measure bandwidth, not latency
REPETITIONS = 3
LOOPBACK = "127."
TEST_NET_ADDRESS = "192.0.2.1"  # reserved for documentation, so reached over the default route


class PreflightResult(NamedTuple):
    """Equal on every rank."""

    table: str
    """A row for each node, then bandwidth and latency of an all_reduce over all ranks."""
    problems: list[str]
    """A line for each problem that would make a run fail."""


def check_nodes(
    settings: Section,
    *,
    device: Literal["auto", "cuda", "cpu"],
    shards_folders: Sequence[Path],
    runs_folder: Path,
    check_disk: Callable[[], object],
    check_data: Callable[[], object],
) -> PreflightResult:
    """Create the process group, check and compare all ranks, measure an all_reduce, and destroy the group.

    Args:
        settings: must be equal on all ranks.
        runs_folder: must be shared by all nodes; need not exist.
        check_disk: raises TostError for a problem.
        check_data: likewise; called if all shards can be opened.

    Raises:
        ConfigError: the device does not exist, or the ranks cannot communicate.
        LostRankError: a rank failed.
    """
    host = socket.gethostname()
    prefer_loopback()
    network = network_in_use("nccl" if device in ("auto", "cuda") and torch.cuda.is_available() else "gloo")
    try:
        world = start_world(device)
        dist.barrier()  # NCCL connects lazily
    except RuntimeError as error:
        problem = first_line(error)
        raise ConfigError(f"{host}: no process group over {network}: {problem}; check the firewall") from None

    with watch_ranks():
        problems = _check_shared_folder(runs_folder)
        free_bytes = next(shutil.disk_usage(path).free for path in (runs_folder, *runs_folder.parents) if path.exists())
        shards = {}
        for folder in shards_folders:
            try:
                shards[f"the fingerprint of {folder}"] = Shards.open(folder).fingerprint[:16]
            except DataError as error:
                problems.append(str(error))
        for check in [check_disk, check_data] if len(shards) == len(shards_folders) else [check_disk]:
            try:
                check()
            except TostError as error:
                problems.append(str(error))

        bandwidth, latency = measure_all_reduce()
        this_rank = {
            "host": host,
            "node": f"{os.environ.get('GROUP_RANK', '0')} {host}",  # torchrun's number of the node
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else world.device.type,
            "free_bytes": free_bytes,
            "network": network,
            "problems": problems,
        }
        ranks = all_gather_object(this_rank)
        lines = [
            *_problem_lines(ranks),
            *find_mismatches(settings_as_facts(settings), "start every node with the same file and overrides"),
            *find_mismatches(shards, "copy the same shards to all nodes"),
            *find_mismatches(_versions(), "install the same version and code on all nodes"),
        ]
        stop_world()
    speed = f"all_reduce over all ranks: {_gb(bandwidth)}/s, {latency * 1e6:.0f} µs for one number"
    return PreflightResult(f"{_table(ranks)}\n{speed}", lines)


def network_in_use(backend: Literal["gloo", "nccl"]) -> str:
    """The interface and address of this node's ranks: `eth0 10.0.0.2`.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this node, or the backend would use
            the loopback interface with several nodes.
    """
    host, variable = socket.gethostname(), f"{backend.upper()}_SOCKET_IFNAME"
    interfaces = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    wanted = os.environ.get(variable, "")
    route = _address_towards(os.environ.get("MASTER_ADDR", TEST_NET_ADDRESS))
    if wanted and not wanted.startswith("^"):  # NCCL's syntax for exclusion
        names = tuple(wanted.removeprefix("=").split(","))
        exactly = backend == "gloo" or wanted.startswith("=")  # otherwise NCCL treats names as prefixes
        matches = (lambda name: name in names) if exactly else (lambda name: name.startswith(names))
        address = next((address for address, name in interfaces.items() if matches(name)), None)
        if not address:
            available = ", ".join(dict.fromkeys(interfaces.values()))
            raise ConfigError(f"{variable}={wanted}: {host} has no such interface; choose one of {available}")
    else:
        address = _address_of_name(host) if backend == "gloo" else route
    several_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if several_nodes and address.startswith(LOOPBACK) and not route.startswith(LOOPBACK):
        raise ConfigError(
            f"{host}: {backend} would listen on {address}, which other nodes cannot reach; "
            f"set {variable}={interfaces.get(route, 'an interface that they can reach')}"
        )
    return f"{interfaces.get(address, 'lo')} {address}"


def measure_all_reduce() -> tuple[float, float]:
    """Bandwidth of a large all_reduce [bytes/s per rank and direction] and latency of one number [s]; collective."""
    size, device = dist.get_world_size(), communication_device()
    large, small = torch.zeros(LARGE_BYTES[device.type] // 4, device=device), torch.zeros(1, device=device)
    seconds = _median_seconds(lambda: dist.all_reduce(large))
    return 2 * (size - 1) / size * large.nbytes / seconds, _median_seconds(lambda: dist.all_reduce(small))


def _check_shared_folder(folder: Path) -> list[str]:
    """Rank 0 creates a file in the folder, and every rank checks that it exists; a collective call."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    name, problems = None, []
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            try:
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=existing, prefix=".preflight_"))
                name = Path(file.name).name
            except OSError as error:
                problems.append(f"{folder} cannot be written: {error.strerror}; choose a writable folder")
        name = all_gather_object(name)[0]
        if name and not (existing / name).exists():
            problems.append(f"{folder.resolve()} is not the folder of rank 0; use a file system shared by all nodes")
        dist.barrier()
    return problems


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), **versions_as_facts()}
    for package in ("deepspeed", "megatron-core", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if communication_device().type == "cuda":
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    return versions


def _problem_lines(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Each problem once, after the names of its ranks."""
    hosts = [rank["host"] for rank in ranks]
    affected: dict[str, list[int]] = defaultdict(list)
    for i, rank in enumerate(ranks):
        for problem in dict.fromkeys(rank["problems"]):
            affected[problem].append(i)
    return [f"{name_ranks(indices, hosts)}: {problem}" for problem, indices in affected.items()]


def _table(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [("node", "ranks", "devices", "disk free", "network")]
    for node in dict.fromkeys(rank["node"] for rank in ranks):
        here = [i for i, rank in enumerate(ranks) if rank["node"] == node]
        devices = Counter(ranks[i]["device"] for i in here)
        first, kinds = ranks[here[0]], ", ".join(f"{count} × {device}" for device, count in devices.items())
        rows.append((node, rank_numbers(here), kinds, _gb(first["free_bytes"]), first["network"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _median_seconds(action: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(1 + REPETITIONS):
        dist.barrier()
        started = time.perf_counter()
        action()
        if communication_device().type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one includes connection setup


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing, but selects the route
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _address_of_name(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"  # as gloo does


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
