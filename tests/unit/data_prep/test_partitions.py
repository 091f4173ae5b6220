"""Partitions of a corpus join to the bytes of one build, for any number of partitions, workers and interruptions."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builds import TEXTS, Built, files, prep_config

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.sources import read_blocks
from tost_lm.data_prep import build
from tost_lm.data_prep.build import BuildProgress, build_shards
from tost_lm.data_prep.partitions import in_partition, open_partitions, with_partition
from tost_lm.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "read_blocks", partial(read_blocks, block_bytes=1000))
    monkeypatch.setattr(build, "COMMIT_SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of all sizes, one of them empty, with more bad rows than are recorded."""
    folder, draws = tmp_path / "corpus", random.Random(0)
    folder.mkdir()
    for number, rows in enumerate([1, 30, 0, 3, 60, 2, 9]):
        lines = [json.dumps({"text": text}) for text in draws.sample(TEXTS, rows)] + ["{"] * (5 * number)
        draws.shuffle(lines)
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def settings(corpus: Path, folder: Path, **more: Any) -> DataPrepConfig:
    return prep_config(corpus, folder, max_bad_fraction=0.9, **more)


def merge(config: DataPrepConfig, built: Built) -> None:
    build_shards(config, built.tokenizer, partitions=open_partitions(config))


@pytest.mark.parametrize("count", [2, 3, pytest.param(12, marks=pytest.mark.quick)])
def test_any_number_of_partitions_gives_the_same_bytes(built: Built, corpus, tmp_path, count):
    build_shards(settings(corpus, tmp_path / "whole"), built.tokenizer)
    config = settings(corpus, tmp_path / "shards")
    parts = [with_partition(config, (number, count)) for number in range(count)]
    rows = [build_shards(one, built.tokenizer)["rows"]["read"] for one in random.Random(count).sample(parts, count)]
    assert sum(rows) == 105 + 105
    assert count > 7 or all(rows)
    merge(config, built)
    assert files(tmp_path / "shards") == files(tmp_path / "whole")
    assert len((tmp_path / "shards/bad_rows.jsonl").read_text().splitlines()) == build.BAD_ROWS_KEPT


def test_a_stopped_merge_resumes_to_the_same_bytes(built: Built, corpus, tmp_path):
    build_shards(settings(corpus, tmp_path / "whole"), built.tokenizer)
    config = settings(corpus, tmp_path / "shards")
    for number in range(2):
        build_shards(with_partition(config, (number, 2)), built.tokenizer)
    partitions = open_partitions(config)
    for stop, joined in ((5, []), (3, partitions), (2, partitions), (5, partitions)):  # the first reads the corpus
        reports = iter(range(stop))

        def report(_: BuildProgress, reports: Iterator[int] = reports) -> None:
            next(reports)

        with pytest.raises(StopIteration):
            build_shards(config, built.tokenizer, report, joined)
    seen: list[Any] = []
    build_shards(config, built.tokenizer, seen.append, partitions)
    assert seen[0].documents > 10
    assert files(tmp_path / "shards") == files(tmp_path / "whole")


def test_missing_partitions_are_named(built: Built, corpus, tmp_path):
    config = settings(corpus, tmp_path / "shards")
    with pytest.raises(DataError, match=r"shards\.partitions: partitions are missing: all; build each with"):
        open_partitions(config)
    build_shards(with_partition(config, (1, 4)), built.tokenizer)
    with pytest.raises(DataError, match=r"partitions are missing: 0/4, 2/4, 3/4; build each with"):
        open_partitions(config)
    for number in range(2):
        build_shards(with_partition(config, (number, 2)), built.tokenizer)
    assert [shards.folder.name for shards in open_partitions(config)] == ["0-of-2", "1-of-2"]


@pytest.mark.parametrize("ending", ["bin", "idx", "text_bytes"])
def test_a_damaged_partition_is_refused_and_found_by_its_own_build(built: Built, corpus, tmp_path, ending):
    config = settings(corpus, tmp_path / "shards")
    for number in range(2):
        build_shards(with_partition(config, (number, 2)), built.tokenizer)
    shards, _ = open_partitions(config)
    path = shards.folder / f"train_00000.{ending}"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    for check in (lambda: merge(config, built), shards.verify):
        with pytest.raises(DataError, match=rf"0-of-2/train_00000\.{ending}: damaged"):
            check()
    assert not (tmp_path / "shards").exists()


def test_the_partition_is_given_or_the_task_of_a_slurm_array(corpus, tmp_path):
    config = settings(corpus, tmp_path / "shards")
    task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}
    assert in_partition(config, {}) == config
    of_task = in_partition(config, task)
    assert (of_task.shards.partition, of_task.shards.folder) == ("2/4", tmp_path / "shards.partitions/2-of-4")
    given = config.model_copy(update={"shards": config.shards.model_copy(update={"partition": "0/1"})})
    assert in_partition(given, task) == config
    with pytest.raises(ConfigError, match="TASK_ID 9: not one of 4 tasks in a row; submit with --array=0-N"):
        in_partition(config, task | {"SLURM_ARRAY_TASK_ID": "9"})
    with pytest.raises(ConfigError, match=r"shards\.partition 2/4: .*nanogpt are not divided; set .*partition=0/1"):
        in_partition(settings(corpus, tmp_path / "shards", split="nanogpt"), task)
