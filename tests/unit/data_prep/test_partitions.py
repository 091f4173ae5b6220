"""Partitions of a corpus join to the documents of one build, for any number of partitions."""

import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from builds import TEXTS, Built, prep_config

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shards import Shards
from tost_lm.data_prep import build
from tost_lm.data_prep.build import build_shards
from tost_lm.data_prep.partitions import in_partition, open_partitions, with_partition
from tost_lm.errors import ConfigError, DataError


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


def content(folder: Path) -> list[Any]:
    """All that is read of a shard folder, which its division into shards does not change."""
    shards = Shards.open(folder)
    shards.verify()
    totals = [{**entry, "shards": None} for entry in shards.manifest["splits"].values()]
    documents = [[ids.tolist() for ids in shards.documents(split)] for split in SPLITS]
    masks = [[mask.tolist() for mask in shards.document_masks(split)] for split in SPLITS]
    return [totals, shards.manifest["rows"], documents, masks, shards.bad_rows()]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("count", [2, 3, pytest.param(12, marks=pytest.mark.quick)])
def test_any_number_of_partitions_gives_the_documents_of_one_build(
    built: Built, corpus, tmp_path, monkeypatch, count, links
):
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=OSError))
    build_shards(settings(corpus, tmp_path / "whole"), built.tokenizer)
    config = settings(corpus, tmp_path / "shards")
    parts = [with_partition(config, (number, count)) for number in range(count)]
    rows = [build_shards(one, built.tokenizer)["rows"]["read"] for one in random.Random(count).sample(parts, count)]
    assert sum(rows) == 105 + 105
    assert count > 7 or all(rows)
    build_shards(config, built.tokenizer, partitions=open_partitions(config))
    shutil.rmtree(tmp_path / "shards.partitions")
    assert content(tmp_path / "shards") == content(tmp_path / "whole")
    assert len(Shards.open(tmp_path / "shards").bad_rows()) == build.BAD_ROWS_KEPT


def test_more_bad_rows_than_allowed_in_all_partitions_are_refused(built: Built, corpus, tmp_path):
    config = prep_config(corpus, tmp_path / "shards", max_bad_fraction=0.4)
    for number in range(2):
        build_shards(with_partition(config, (number, 2)), built.tokenizer)
    with pytest.raises(DataError, match=r"; 105 of 210 rows cannot be read .*max_bad_fraction"):
        build_shards(config, built.tokenizer, partitions=open_partitions(config))
    assert not (tmp_path / "shards").exists()


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
