"""Partitions of a corpus: each is tokenized on its own, as a shard folder, and their shards become those of one."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import SPLITS, file_sizes
from tost_lm.data.shards import Shards
from tost_lm.data.sources import token_files
from tost_lm.errors import ConfigError, DataError


def partition_of(config: DataPrepConfig) -> tuple[int, int] | None:
    """The number of the partition that `config` builds, and of all partitions; None: the whole corpus."""
    if config.shards.partition is None:
        return None
    number, _, count = config.shards.partition.partition("/")
    return int(number), int(count)


def with_partition(config: DataPrepConfig, chosen: tuple[int, int] | None) -> DataPrepConfig:
    """The settings to build a partition, as `partition_of`, in a folder of its own."""
    folder = _folder(config, *chosen) if chosen else config.shards.folder
    partition = f"{chosen[0]}/{chosen[1]}" if chosen else None
    return config.model_copy(
        update={"shards": config.shards.model_copy(update={"folder": folder, "partition": partition})}
    )


def in_partition(config: DataPrepConfig, environment: Mapping[str, str] = os.environ) -> DataPrepConfig:
    """The settings to build a partition: the given one, or the task of a Slurm array; `config` for the whole corpus.

    Raises:
        ConfigError: the tasks of the array are not numbered one by one, or a corpus that is not divided.
    """
    chosen = partition_of(config)
    if chosen is None and "SLURM_ARRAY_TASK_ID" in environment:
        task, first, count = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT"))
        chosen = task - first, count
        if chosen[0] >= count:
            raise ConfigError(f"SLURM_ARRAY_TASK_ID {task}: not one of {count} tasks in a row; submit with --array=0-N")
    if chosen is None or chosen[1] == 1:
        return with_partition(config, None)
    if config.corpus.split == "nanogpt" or token_files(config.corpus.source):
        raise ConfigError(
            f"shards.partition {chosen[0]}/{chosen[1]}: token files and corpus.split nanogpt are not divided; set "
            "shards.partition=0/1"
        )
    return with_partition(config, chosen)


def open_partitions(config: DataPrepConfig) -> list[Shards]:
    """The shards of each of the partitions, in order; of several complete sets, the one of fewest.

    Raises:
        DataError: there are none, some are missing, or one is damaged.
    """
    home = _home(config)
    names = [path.name.split("-of-") for path in home.glob("[0-9]*-of-[0-9]*")]
    counts = sorted({int(count) for _, count in names})
    missing = {count: [n for n in range(count) if not _folder(config, n, count).exists()] for count in counts}
    count = min(missing, key=lambda count: (len(missing[count]), count), default=0)
    if not count or missing[count]:
        named = ", ".join(f"{number}/{count}" for number in missing.get(count, [])) or "all"
        raise DataError(
            f"{home}: partitions are missing: {named}; build each with tost prepare shards, shards.partition=i/n"
        )
    return [Shards.open(_folder(config, number, count)) for number in range(count)]


def link_partitions(partitions: Sequence[Shards], folder: Path) -> dict[str, Any]:
    """Link the shards of all partitions, in their order, in `folder`; they outlive the partitions' folders.

    Returns what the manifest records of them.
    """
    splits: dict[str, Any] = {split: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in SPLITS}
    for one in partitions:
        for split, joined in splits.items():
            for entry in one.entries(split):
                name = f"{split}_{len(joined['shards']):05d}"
                for ending in file_sizes(entry, one.manifest["dtype"]):
                    _link(one.folder / f"{entry['name']}.{ending}", folder / f"{name}.{ending}")
                joined["shards"].append({**entry, "name": name})
                joined |= {what: joined[what] + entry[what] for what in ("documents", "tokens", "bytes")}
    numbers = [one.manifest["rows"] for one in partitions]
    return {"rows": {what: sum(rows[what] for rows in numbers) for what in numbers[0]}, "splits": splits}


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # a file system without such links, or a file of another owner
        shutil.copyfile(file, target)


def _home(config: DataPrepConfig) -> Path:
    folder = config.shards.folder.resolve()
    return folder.with_name(f"{folder.name}.partitions")


def _folder(config: DataPrepConfig, number: int, count: int) -> Path:
    return _home(config) / f"{number}-of-{count}"
