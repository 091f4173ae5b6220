"""Start the ranks of this node with torch's elastic launcher, and end as they end.

`python -m tost_lm.parallel.launch MODULE [ARGUMENT…]` starts those of one of several nodes for
configs/cluster/launch.sh, which describes and checks the variables.
"""

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import FrameType
from typing import Any, NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import ConfigError, TostError, first_line, install_hint
from tost_lm.lifetime import end_with_parent
from tost_lm.parallel.settings import LaunchConfig

LOOPBACK, LAUNCHER = "127.0.0.1", "TOST_LM_LAUNCHER"
NODES_WAIT = timedelta(minutes=15)  # for the launchers of the other nodes
NUMA_NODES = Path("/sys/devices/system/node/online")
PYTHON = ("-P", "-u", "-m")
"""Without -P, modules of the working folder would run in place of those of Python."""
EXIT_NEXT_STAGE = 76
"""Exit code of ranks whose program is to run again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


def ranks_of_launch(model_ranks: int, launch: LaunchConfig | None = None, device: str | None = None) -> int:
    """The world size: that of the launcher, or the number of ranks to start on this node.

    Args:
        model_ranks: tensor × sequence, the least number of ranks.
        launch: the settings of a program that can use more ranks; None: it starts `model_ranks`.
        device: `run.device` of a program that has it; GPUs count if it is `auto` or `cuda`.

    Raises:
        ConfigError: `launch.ranks` is not what a launcher started on this node, or more ranks than GPUs are needed.
    """
    wanted = launch.ranks if launch else None
    if "RANK" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        started = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if wanted not in (None, started):
            raise ConfigError(
                f"launch.ranks {wanted}: the launcher has started {started} ranks on this node; remove launch.ranks"
            )
        return world_size
    gpus = _gpus() if device in (None, "auto", "cuda") else 0
    if not gpus:
        copies = launch.cpu_ranks // model_ranks if launch else 1
        return wanted or max(1, copies) * model_ranks
    ranks = wanted or (max(gpus, model_ranks) if launch else model_ranks)
    if ranks > gpus:
        what = f"launch.ranks {wanted}" if wanted else f"parallel.tensor × parallel.sequence = {model_ranks} ranks"
        on_cpus = "run.device=cpu" if device else "CUDA_VISIBLE_DEVICES= before the command"
        raise ConfigError(
            f"{what}: this node has {gpus} {'GPU' if gpus == 1 else 'GPUs'}; start at most one rank per GPU, or "
            f"rehearse on CPUs with {on_cpus}"
        )
    return ranks


def start_ranks(command: str, ranks: int) -> None:
    """Run `tost COMMAND` with the arguments of this process on several ranks, and exit as `_launch` does. The ranks
    and their store listen on the loopback interface only.

    Returns if this process is a rank of a launcher, or `ranks` is 1.

    Raises:
        ConfigError: psutil is not installed.
        TostError: as `_exit_code`.
    """
    if "RANK" in os.environ and LAUNCHER in os.environ:
        end_with_parent(int(os.environ[LAUNCHER]))  # else a rank that starts would wait for its store
    if "RANK" in os.environ or ranks == 1:
        return
    if not find_spec("psutil"):
        raise ConfigError(f"{ranks} ranks need psutil; {install_hint('train')}, or start one rank")
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # torch lets any host connect to its store. The launcher finds this one by its port, and opens no other.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(LOOPBACK, port, 1, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
    _launch(["tost_lm.cli.main", *command.split(), *sys.argv[1:]], ranks, f"{store.host}:{store.port}")


def start_ranks_of_node(path: None, config: Section) -> NoReturn:
    """Run a module with arguments on the ranks of this node, and exit as `_launch` does.

    Raises:
        TostError: node 0 cannot be reached, or a node is missing; or as `_exit_code`.
    """
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    nodes, node, ranks = (int(os.environ[name]) for name in ("NODES", "NODE_RANK", "RANKS_PER_NODE"))
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for torch
    try:
        # Waits for all nodes; the launcher finds this store by its port.
        store = TCPStore(address, int(port), nodes, is_master=node == 0, timeout=NODES_WAIT, multi_tenant=True)
        _launch(sys.argv[1:], ranks, f"{store.host}:{store.port}", node, nodes)
    except DistError as error:
        raise TostError(
            f"MASTER_ADDR={address} MASTER_PORT={port}, node {node} of {nodes}: {first_line(error)}; launch all nodes "
            "with the same NODES, MASTER_ADDR and MASTER_PORT, a free port that no firewall blocks"
        ) from None


def _launch(program: list[str], ranks: int, store: str, node: int = 0, nodes: int = 1) -> NoReturn:
    """Run a module with its arguments on the ranks of this node, and exit with their exit code.

    Signals are forwarded to all ranks. Cores are divided among the ranks unless OMP_NUM_THREADS is set. With a rank for
    each GPU, a rank runs on the cores of its GPU's NUMA node, if the host has several nodes and numactl.

    Args:
        store: host:port of an open store, that of node 0.

    Raises:
        TostError: as `_exit_code`.
        DistError: the store failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads // ranks)))
    config = lambda launch: ElasticConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=f"tost_lm-{launch}",  # of keys in the store
        rdzv_backend="static",
        rdzv_endpoint=store,
        rdzv_configs={"rank": node},
        max_restarts=0,
        numa_options=_numa_binding(ranks),
        signals_to_handle="",  # its handlers kill ranks that are still saving, and hide their exit codes
    )
    logging.disable()  # the ranks report their own errors
    forwarded, code = _forward_signals(), EXIT_NEXT_STAGE
    launch = 0
    while code == EXIT_NEXT_STAGE:
        try:
            elastic_launch(config(launch), sys.executable)(*PYTHON, *program)
            code = 0
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
            code = _exit_code([(rank, failure.exitcode) for rank, failure in failures], forwarded)
        launch += 1
    sys.exit(code)


def _numa_binding(ranks: int) -> Any:
    """That of torch's launcher, which needs numactl; None: the host does not have it, or other ranks than GPUs."""
    is_one_node = not NUMA_NODES.exists() or NUMA_NODES.read_text().strip() == "0"
    if is_one_node or not which("numactl") or _gpus() != ranks:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)  # as in a container without /sys


def end_for_next_stage(command: str) -> NoReturn:
    """End this process, and run `tost COMMAND` with the same arguments: in its place, or the launcher does it."""
    if "RANK" in os.environ:
        sys.exit(EXIT_NEXT_STAGE)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *PYTHON, "tost_lm.cli.main", *command.split(), *sys.argv[1:]])


def _exit_code(failures: list[tuple[int, int]], forwarded: set[int]) -> int:
    """The exit code of a launch whose ranks failed with these codes, the first failure first; negative for signals.

    Raises:
        TostError: a signal from elsewhere ended a rank, and no other rank of this node has reported it.
    """
    for _, code in failures:
        if code in (1, 2):  # this rank has printed why; the launcher has ended others with SIGTERM
            return code
    rank, code = failures[0]
    if code < 0 and -code not in forwarded:
        record_lost_rank()
        raise TostError(f"rank {rank} was ended by {signal.Signals(-code).name}; run the same command to resume")
    return code if code > 0 else 128 - code


def record_lost_rank() -> None:
    """Create LOST_RANK_FILE if it is set: configs/cluster/train.sbatch then requeues its job."""
    if path := os.environ.get("LOST_RANK_FILE"):
        with suppress(OSError):
            Path(path).touch()


def _forward_signals() -> set[int]:
    """From now on, signals go to the ranks, or end this process if there are none. Returns those forwarded so far."""
    import psutil

    forwarded: set[int] = set()

    def forward(signum: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        if not ranks and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not ranks:
            sys.exit(128 + signum)
        forwarded.add(signum)
        for rank in ranks:
            rank.send_signal(signum)

    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, forward)
    return forwarded


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    run_program(
        start_ranks_of_node,
        name="tost_lm.parallel.launch",
        doc=__doc__ or "",
        positional="[ARGUMENT…]",
        config=Section,
        arguments=[],
    )
