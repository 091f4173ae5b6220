"""Partitions of a corpus as tasks of Ray, on the nodes of a cluster with a common file system."""

import logging
import os
import socket
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shards import Shards
from tost_lm.data_prep.build import BusyError
from tost_lm.data_prep.making import checked_partitions, make_shards
from tost_lm.data_prep.partitions import with_partition
from tost_lm.errors import DataError, first_line, install_hint
from tost_lm.progress import ProgressBar

RETRIES = 10
WAIT_S, CONNECT_S = 3.0, 10.0


def partitions_on_ray(config: DataPrepConfig) -> list[Shards]:
    """The shards of all partitions, built in the cluster of RAY_ADDRESS or on this computer; finished ones are reused.

    Ray repeats the tasks of lost nodes and processes, which resume.

    Raises:
        DataError: Ray is missing or cannot be reached, or a partition cannot be built.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise DataError(f"shards.engine ray: needs the package ray; {install_hint('ray')}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "local")
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.removeprefix("ray://"), int(port)), CONNECT_S).close()  # Ray waits minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"RAY_ADDRESS {address}: {first_line(error)}; start Ray there or correct the address") from None
    count, workers = config.shards.partitions, config.shards.workers or 1
    build = ray.remote(num_cpus=workers, max_retries=RETRIES, retry_exceptions=[BusyError])(_build)
    try:
        waiting = [build.remote(config, (number, count), workers, Path.cwd()) for number in range(count)]
        with ProgressBar("tokenizing", "partitions") as bar:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
                bar(count - len(waiting), count)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise DataError(f"shards.engine ray: {type(error).__name__}; run the same command to resume") from None
    finally:
        ray.shutdown()
    return checked_partitions(config)


def _build(config: DataPrepConfig, partition: tuple[int, int], workers: int, folder: Path) -> None:
    """In a process of Ray: build a partition; paths are relative to `folder`."""
    os.chdir(folder)
    config = with_partition(config, partition)
    try:
        make_shards(config.model_copy(update={"shards": config.shards.model_copy(update={"workers": workers})}))
    except BusyError:
        time.sleep(WAIT_S)  # the processes of a lost node may still be ending
        raise
