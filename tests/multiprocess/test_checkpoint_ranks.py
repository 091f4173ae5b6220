"""Checkpoints of several ranks: bitwise resume on the same layout, resume on other layouts, and failed saves."""

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed_training import (
    RUN,
    Curve,
    Trainee,
    Training,
    assert_kills_lose_nothing,
    checkpoint_files,
    error_of,
    in_turn,
    make_corpora,
    problem_of,
    small_disk,
)
from other_forms import OTHER_FORMS
from training_on_layouts import layout_of

import tost_lm
from tost_lm.checkpointing.run_folder import find_checkpoint, step_folder
from tost_lm.data.loader import Corpora
from tost_lm.errors import CheckpointError
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import FLOAT32_REORDERED, run_on_ranks

DELTA = {"pattern": "TDA"}
RecordFault = Callable[[str, int, str], None]
Times = Callable[[int], int]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return make_corpora(tmp_path_factory.mktemp("corpora"))


def stop_and_resume(trainees: list[Trainee], stops: list[tuple[int, ...]]) -> list[list[tuple[Curve, Curve]]]:
    """Curves of each run without a stop, in folder `never`, and of it resumed after 0 or 2 steps, in `0` and `2`."""
    outcomes = []
    for trainee, chosen in zip(trainees, stops, strict=True):
        training = trainee._replace(folder=trainee.folder / "never").begin(keep_latest_k=9)
        training.writer.save(training.progress)
        curve, outcome = training.train(4, (2, 4)), []
        for stop in chosen:
            resumed = trainee._replace(folder=trainee.folder / str(stop))
            if dist.get_rank() == 0:
                checkpoint = step_folder(RUN, stop).absolute()
                shutil.copytree(checkpoint, step_folder(resumed.folder / RUN, stop))
            dist.barrier()
            outcome.append((curve[stop:], in_turn(resumed, 4, 4)))
            os.chdir(training.folder)
        outcomes.append(outcome)
    return outcomes


@pytest.mark.slow
def test_a_resumed_run_equals_one_without_a_stop_bitwise(tmp_path: Path, corpora: Corpora):
    layouts = {
        "stage 0": {"zero_stage": 0}, "muon": {"zero_stage": 0, "sequence": 2}, "stage 1": {},
        "stage 3": {"zero_stage": 3}, "bf16": {}, "tensor": {"tensor": 2}, "other forms": {"tensor": 2},
    }  # fmt: skip
    stops = [(2,), (0, 2), (2,), (0, 2), (2,), (2,), (2,)]
    models = {"other forms": OTHER_FORMS, "stage 0": DELTA, "stage 3": DELTA, "tensor": DELTA}
    trainees = [
        Trainee(
            tmp_path / name, corpora, layout_of(**layout), name == "bf16",
            model=models.get(name, {}), optimizer="muon" if name == "muon" else "adamw",
        )
        for name, layout in layouts.items()
    ]  # fmt: skip
    for outcomes in run_on_ranks(stop_and_resume, 2, trainees, stops):
        for name, outcome in zip(layouts, outcomes, strict=True):
            for expected, found in outcome:
                assert found == expected, name
    for trainee, chosen in zip(trainees, stops, strict=True):
        expected = checkpoint_files(trainee.folder / "never", 4)
        for stop in chosen:
            assert checkpoint_files(trainee.folder / str(stop), 4) == expected, (trainee.folder.name, stop)


def several(trainees: list[Trainee], until: int) -> list[Curve]:
    return [in_turn(trainee, until, until) for trainee in trainees]


def _on_engine(engine: str, layout: dict[str, int]) -> ParallelConfig:
    """The layout; what DeepSpeed refuses stays on fsdp."""
    refused = {"tensor", "shard_ranks"} & {*layout} or layout.get("zero_stage") == 0
    return layout_of(**layout, engine="fsdp" if refused else engine)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("fsdp",), ("deepspeed", "fsdp")], ids=["fsdp", "engines in turn"])
def test_a_run_resumes_on_other_parallel_layouts(tmp_path: Path, corpora: Corpora, engines: tuple[str, ...]):
    """And of another engine, if two take turns."""
    float32, bfloat16, tensor = (
        Trainee(tmp_path / name, corpora, bfloat16=name == "bfloat16", model={} if name == "bfloat16" else DELTA)
        for name in ("float32", "bfloat16", "tensor")
    )
    legs = [
        (4, [{}, {"zero_stage": 3, "shard_ranks": 2}, {"tensor": 2}]),
        (2, [{"zero_stage": 3}, {}, {"zero_stage": 0}]),
        (4, [{"zero_stage": 0}, {"zero_stage": 3}, {"tensor": 2, "sequence": 2, "zero_stage": 3}]),
        (1, [{}, {}, {}]),
    ]
    never_stopped = [run._replace(folder=tmp_path / f"never {run.folder.name}") for run in (float32, bfloat16)]
    true_wide, true_narrow = run_on_ranks(several, 1, never_stopped, 8)[0]
    curves: list[Curve] = [[], [], []]
    for number, (ranks, layouts) in enumerate(legs, start=1):
        runs = zip((float32, bfloat16, tensor), layouts, strict=True)
        engine = engines[number % len(engines)]
        trainees = [run._replace(parallel=_on_engine(engine, layout)) for run, layout in runs]
        for curve, more in zip(curves, run_on_ranks(several, ranks, trainees, 2 * number)[0], strict=True):
            curve += more
    # bfloat16 rounds differently with other numbers of sequences; the mean over a batch is off by a few per cent of ε.
    narrow = torch.finfo(torch.bfloat16).eps / 16
    tolerances = (FLOAT32_REORDERED, narrow, FLOAT32_REORDERED)
    for curve, expected, relative in zip(curves, (true_wide, true_narrow, true_wide), tolerances, strict=True):
        assert [row[0] for row in curve] == pytest.approx([row[0] for row in expected], rel=relative)


def train_waiting_for_saves(trainee: Trainee) -> list[str]:
    training, newest = trainee.begin(), []
    for _ in range(2):
        training.step()
        training.writer.save(training.progress)
        training.writer.finish()
        newest.append(find_checkpoint(RUN).name)
    return newest


@pytest.mark.quick
def test_one_flipped_bit_in_any_file_is_found_and_the_previous_checkpoint_is_used(
    tmp_path: Path, corpora: Corpora, times: Times, record_fault: RecordFault
):
    flips, generator = times(200), random.Random(0)
    for newest in run_on_ranks(train_waiting_for_saves, 2, Trainee(tmp_path, corpora)):
        assert newest == ["step_00000001", "step_00000002"]
    files = checkpoint_files(tmp_path, 2)
    assert files.pop("README.md").startswith(b"---\nlibrary_name: tost_lm\n")  # not in the manifest: it may be edited
    assert files.keys() == {
        "manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors",
        "model.json", "config.toml", "training.json", "rng.safetensors", "tokenizer.model",
    }  # fmt: skip
    sizes = [len(data) for name, data in files.items() if name.startswith("optimizer")]
    assert max(sizes) < 1.2 * min(sizes)
    for name, data in files.items():
        path = step_folder(tmp_path / RUN, 2) / name
        for bit in (0, 8 * len(data) - 1, *(generator.randrange(8 * len(data)) for _ in range(flips))):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            messages: list[str] = []
            assert find_checkpoint(tmp_path / RUN, messages.append).name == "step_00000001"
            assert [str(path) in line for line in messages] == [True]
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            tost_lm.load(path.parent)
        path.write_bytes(data)
    record_fault("a bit flipped in a checkpoint", flips * len(files), "refused; the file is named")


@pytest.mark.timeout(1800)
def test_a_kill_in_a_save_loses_no_complete_checkpoint(
    tmp_path: Path, corpora: Corpora, times: Times, record_fault: RecordFault
):
    kills = times(50)
    torn = assert_kills_lose_nothing(tmp_path / "run", corpora, kills)
    assert torn >= kills // 5
    record_fault("SIGKILL in a save", kills, f"the newest complete checkpoint loads ({torn} saves were interrupted)")


def error_of_poll(training: Training) -> tuple[str, bool | None]:
    """The error of an async save in the main thread of this rank, and whether this rank prints it."""

    def poll() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            training.writer.poll()
            time.sleep(0.01)

    training.step()
    training.writer.save(training.progress)  # raises nothing yet
    error = error_of(poll)
    return str(error), error.printed_here


def save_in_vain(trainee: Trainee) -> list[tuple[str, bool | None]]:
    training, errors = trainee.begin(), []
    training.train(1, (1,))
    home, rank = Path.cwd(), dist.get_rank()
    if rank == 1:  # a node that does not share the folder
        os.chdir("/")
    errors.append(error_of_poll(training))
    os.chdir(home)
    dist.barrier()
    if rank == 0:
        (RUN / "checkpoints").rename(RUN / "elsewhere")
        (RUN / "checkpoints").touch()
    errors.append(error_of_poll(training))
    dist.barrier()
    if rank == 0:
        (RUN / "checkpoints").unlink()
        (RUN / "elsewhere").rename(RUN / "checkpoints")
        training.writer.save(training.progress)
        errors.append((problem_of(training.writer.finish), None))  # the other rank does not save
    dist.barrier()
    return errors


def test_a_save_that_fails_in_the_background_is_raised_at_the_next_poll(tmp_path: Path, corpora: Corpora):
    trainee = Trainee(tmp_path, corpora, layout_of(zero_stage=0), timeout_s=2)
    mine, other = run_on_ranks(save_in_vain, 2, trainee)
    line = "runs/r/checkpoints/.step_00000002.tmp/model-00002-of-00002.safetensors: cannot be written: No such file or"
    assert other[0][0].startswith(line)
    assert mine[0][0].startswith(f"rank 1: {line}")
    assert mine[1][0].startswith("runs/r/checkpoints/.step_00000003.tmp: cannot be written: ")
    assert other[1][0] == mine[1][0]
    assert [printed for _, printed in mine] == [None, None, None]  # as any error of rank 0
    assert [printed for _, printed in other] == [False, False]
    assert mine[2][0].startswith(
        "rank 1 did not write its shard of a checkpoint: no message within 2 s; run the same command"
    )
    assert [path.name for path in (tmp_path / RUN / "checkpoints").iterdir()] == ["step_00000001"]
    assert find_checkpoint(tmp_path / RUN).name == "step_00000001"


def fill_the_disk(trainee: Trainee) -> list[str]:
    training = trainee.begin(keep_latest_k=1)
    training.train(1, (1,))
    with Path("filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(".").free - 2**16)
    lines = [problem_of(lambda: training.train(2, (2,))), problem_of(lambda: trainee.begin(keep_latest_k=1))]
    Path("filler").unlink()
    return lines


def run_out_of_files(trainee: Trainee) -> tuple[Curve, str]:
    training = trainee.begin(keep_latest_k=1)
    return training.curve, problem_of(lambda: training.train(4, (2, 4)))


def test_a_full_disk_is_reported_before_and_during_a_save(tmp_path: Path, corpora: Corpora):
    with small_disk(tmp_path / "bytes", "size=4m") as disk:
        (lines,) = run_on_ranks(fill_the_disk, 1, Trainee(disk, corpora))
        assert "runs/r/checkpoints/step_00000002: this checkpoint needs " in lines[0]
        assert "runs/r/checkpoints: a checkpoint needs " in lines[1]
        for line in lines:
            assert "its disk has 65,536 free bytes; free space or lower checkpoint.keep_latest_k 1" in line
        assert [path.name for path in (disk / RUN / "checkpoints").iterdir()] == ["step_00000001"]
    # Of 22 inodes the folders use 4, the first checkpoint 12, and 6 are left for the second.
    with small_disk(tmp_path / "files", "size=9m,nr_inodes=22") as disk:
        trainee = Trainee(disk, corpora)
        for _, line in run_on_ranks(run_out_of_files, 2, trainee):
            assert "runs/r/checkpoints/.step_00000004.tmp/" in line
            assert (
                "cannot be written: No space left on device; free space or lower checkpoint.keep_latest_k and run"
                in line
            )
        assert [path.name for path in (disk / RUN / "checkpoints").iterdir()] == ["step_00000002"]
        subprocess.run(["mount", "-o", "remount,nr_inodes=99", disk], check=True)
        (resumed, _) = run_on_ranks(in_turn, 2, trainee, 4, 4)
        (never_stopped, _) = run_on_ranks(in_turn, 2, trainee._replace(folder=tmp_path / "never"), 4)
        assert resumed == never_stopped[2:]
