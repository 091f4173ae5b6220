"""Faults in saves, in full numbers; `tests/multiprocess/test_checkpoint_ranks.py` has fewer of the same."""

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointed_training import (
    RUN,
    Trainee,
    assert_kills_lose_nothing,
    checkpoint_files,
    in_turn,
    make_corpora,
    problem_of,
    small_disk,
)

from tost_lm.checkpointing.format import verify_checkpoint
from tost_lm.checkpointing.run_folder import find_checkpoint, step_folder
from tost_lm.data.loader import Corpora
from tost_lm.errors import CheckpointError
from tost_lm.testing import run_on_ranks

RecordFault = Callable[[str, int, str], None]
KILLS = 50
BITS = 200


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.mark.timeout(1800)
def test_kills_in_saves_lose_no_complete_checkpoint(tmp_path: Path, corpora: Corpora, record_fault: RecordFault):
    torn = assert_kills_lose_nothing(tmp_path / "run", corpora, KILLS)
    assert torn > KILLS / 5
    record_fault("SIGKILL in a save", KILLS, f"the newest complete checkpoint loads ({torn} saves were interrupted)")


def test_flipped_bits_in_any_file_are_refused_by_name(tmp_path: Path, corpora: Corpora, record_fault: RecordFault):
    run_on_ranks(in_turn, 2, Trainee(tmp_path, corpora), 1, 1)
    folder, generator = step_folder(tmp_path / RUN, 1), random.Random(0)
    for name, data in checkpoint_files(tmp_path, 1).items():
        for _ in range(BITS):
            damaged, bit = bytearray(data), generator.randrange(8 * len(data))
            damaged[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointError) as refused:
                verify_checkpoint(folder)
            assert str(refused.value).startswith(str(folder / name))
        (folder / name).write_bytes(data)
    verify_checkpoint(folder)
    record_fault(
        "a bit flipped in a checkpoint", BITS * len(checkpoint_files(tmp_path, 1)), "refused; the file is named"
    )


def save_while_another_fills_the_disk(trainee: Trainee) -> str:
    training = trainee.begin(keep_latest_k=1)
    training.train(1, (1,))
    training.step()

    def fill() -> None:
        while not (RUN / "checkpoints/.step_00000002.tmp").exists():
            pass
        with Path("filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(".").free - 2**15)

    threading.Thread(target=fill).start()
    training.writer.save(training.progress)
    line = problem_of(training.writer.finish)
    Path("filler").unlink()
    return line


def test_a_disk_that_fills_up_in_the_midst_of_a_save_loses_nothing(tmp_path: Path, corpora: Corpora):
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        (line,) = run_on_ranks(save_while_another_fills_the_disk, 1, Trainee(disk, corpora))
        assert ".step_00000002.tmp/" in line
        assert "cannot be written: No space left on device; free space or lower checkpoint.keep_latest_k" in line
        assert [path.name for path in (disk / RUN / "checkpoints").iterdir()] == ["step_00000001"]
        assert find_checkpoint(disk / RUN).name == "step_00000001"
        assert len(run_on_ranks(in_turn, 1, Trainee(disk, corpora), 2, 2)[0]) == 1
