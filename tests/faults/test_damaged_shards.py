"""Token shards that change before, during and between launches: a line names file and bytes, and nothing is lost."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from launches import launch, train
from test_failing_disks import assert_ends_in_one_line
from test_stopped_runs import assert_same_run

from tost_lm.config import load_config
from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.shard_format import block_hashes
from tost_lm.data.shards import Shards
from tost_lm.errors import DataError
from tost_lm.files import manifest_bytes
from tost_lm.pretrain.settings import PretrainConfig

RecordFault = Callable[[str, int, str], None]
FIX = "rebuild the shards with tost prepare shards"


@pytest.fixture
def folder(workplace: Path, shards: Path) -> Path:
    """A shard folder of the workplace that may be damaged."""
    (workplace / "shards").unlink()
    return Path(copytree(shards, workplace / "shards"))


def flip_a_bit(path: Path) -> None:
    """In place: an open file sees it."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def first_uses(workplace: Path, folder: Path) -> dict[Path, int]:
    """The step of the run that first reads each shard."""
    config = load_config(PretrainConfig, workplace / "run.toml")
    uses = {}
    for path in sorted(folder.glob("train_*.bin")):
        batches = TrainingBatches(
            Corpora.open({folder: 1.0}), BatchShard(0, 1, ((0, 32),)), packing=config.data.packing,
            seed=config.train.seed, global_batch_size=4, micro_batch_size=2, seq_len=32, ignored_label=-100,
        )  # fmt: skip
        flip_a_bit(path)
        uses[path] = next(step for step in range(config.train.steps) if is_refused(batches, step))
        flip_a_bit(path)
    return uses


def is_refused(batches: TrainingBatches, step: int) -> bool:
    try:
        _ = batches[step]
    except DataError:
        return True
    return False


@pytest.mark.slow
def test_a_shard_that_changes_during_a_run(
    workplace: Path, folder: Path, uninterrupted: Path, record_fault: RecordFault
):
    uses = first_uses(workplace, folder)
    shard = max(uses, key=lambda path: uses[path])
    step = uses[shard]
    assert step > 40
    with launch(workplace, 2, "data.workers=1") as running:
        running.until(lambda: running.step() >= 1)
        running.send(signal.SIGSTOP)
        assert running.step() < step - 10
        flip_a_bit(shard)
        running.send(signal.SIGCONT)
        assert_ends_in_one_line(running, f"shards/{shard.name}: damaged between bytes 0 and ", FIX)
        assert running.step() in range(step - 1, step + 1)
    flip_a_bit(shard)
    assert f"resuming from runs/tiny/checkpoints/step_{step // 10 * 10:08d}" in train(workplace, 2)
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    outcome = "the first step that reads it ends the run; the error names file and bytes; bit-exact afterwards"
    record_fault("a shard changes during a run", 1, outcome)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_shard_that_is_truncated_during_a_run(workplace: Path, folder: Path, workers: int):
    """The run has checked these shards and keeps them open."""
    checked = sorted(path for path, step in first_uses(workplace, folder).items() if step <= 10)
    assert len(checked) > 10
    with launch(workplace, 1, f"data.workers={workers}", "train.steps=100000") as running:
        running.until(lambda: running.step() >= 11)
        for path in checked:
            os.truncate(path, 0)
        assert_ends_in_one_line(running, "shards/train_", ".bin: damaged, 0 bytes instead of ", FIX)


def test_a_token_id_beyond_the_vocabulary(workplace: Path, folder: Path):
    """In a folder with correct hashes, as another writer may have made."""
    shard, place = folder / "train_00002.bin", 17
    tokens = np.fromfile(shard, np.uint16)
    tokens[place] = 60_000
    tokens.tofile(shard)
    manifest = Shards.open(folder).manifest
    manifest["splits"]["train"]["shards"][2]["bin_xxh3"] = list(block_hashes(shard))
    (folder / "manifest.json").write_bytes(manifest_bytes(json.loads(json.dumps(manifest))))
    with launch(workplace, 1) as running:
        wanted = "shards/train_00002.bin: token id 60000 at byte 34 is not in the vocabulary of 384"
        assert_ends_in_one_line(running, wanted, FIX)
