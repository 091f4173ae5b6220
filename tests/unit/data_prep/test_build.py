"""Builds give the same bytes for any number of workers and interruptions; errors are one line."""

import json
import os
import random
import resource
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from builds import TEXTS, Built, StoppedError, build_in_small_steps, files, prep_config, stop_after

from tost_lm.data.shards import Shards
from tost_lm.data.sources import read_blocks
from tost_lm.data_prep import build
from tost_lm.data_prep.build import BuildProgress, build_shards, building_folder, recover_folder
from tost_lm.errors import ConfigError, DataError


@pytest.mark.quick
@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_does_not_change_the_shards(built: Built, tmp_path, workers):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards", workers)
    seen: list[BuildProgress] = []
    assert build_shards(config, built.tokenizer, seen.append) == built.manifest
    assert files(tmp_path / "shards") == files(built.config.shards.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    totals = [
        sum(entry[what] for entry in built.manifest["splits"].values()) for what in ("documents", "bytes", "tokens")
    ]
    assert seen[0] == (0, 0, 0, 0.0)
    assert list(seen[-1]) == [*totals, 1.0]
    assert len(seen) > 10


@pytest.mark.quick
def test_a_stopped_build_resumes_to_the_same_bytes(built: Built, tmp_path):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards")
    seen: list[BuildProgress] = []
    for blocks_each_time in (1, 5, 3, 0, 4):
        with pytest.raises(StoppedError):
            build_shards(config, built.tokenizer, stop_after(1 + blocks_each_time))
        assert not config.shards.folder.exists()
    build_shards(config, built.tokenizer, seen.append)
    assert seen[0].documents > 10  # it did not start again
    assert files(tmp_path / "shards") == files(built.config.shards.folder)


def test_data_after_the_last_commit_is_truncated(built: Built, tmp_path, monkeypatch):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards")
    with pytest.raises(StoppedError):
        build_shards(config, built.tokenizer, stop_after(8))
    monkeypatch.setattr(build, "COMMIT_SECONDS", 1e9)
    with pytest.raises(StoppedError):
        build_shards(config, built.tokenizer, stop_after(6))
    build_shards(config, built.tokenizer)
    assert files(tmp_path / "shards") == files(built.config.shards.folder)


@pytest.mark.slow
def test_a_build_killed_at_20_random_moments_ends_with_the_same_bytes(built: Built, tmp_path):
    """SIGKILL to the reading process; its tokenizing processes must end by themselves."""
    import psutil

    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards", workers=2)
    context = get_context("forkserver")
    context.set_forkserver_preload(["builds"])  # so that kills hit the build, not its imports
    draws, kills, finished, whole_build, orphans = random.Random(), 0, 0, 3.0, []
    while kills < 20 or not finished:
        process = context.Process(target=build_in_small_steps, args=(config, built.tokenizer))
        start = time.monotonic()
        process.start()
        process.join(draws.uniform(0, whole_build) if kills < 20 else None)
        if process.is_alive():
            kills += 1
            with suppress(psutil.NoSuchProcess):  # it may end now
                orphans += psutil.Process(process.pid).children()
            process.kill()
            process.join()
        else:
            assert process.exitcode == 0
            whole_build = time.monotonic() - start
            finished += 1
            assert files(tmp_path / "shards") == files(built.config.shards.folder)
            assert [path.name for path in tmp_path.iterdir()] == ["shards"]
            shutil.rmtree(tmp_path / "shards")
    _, left = psutil.wait_procs(orphans, timeout=10)
    assert not left


def test_a_corpus_that_changes_while_it_is_read_is_refused(built: Built, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(Path(built.config.corpus.source).read_bytes())
    config = prep_config(corpus, tmp_path / "shards")

    def change(now: BuildProgress) -> None:
        if not now.documents:
            os.utime(corpus, (1, 1))

    with pytest.raises(DataError, match="changed while it was read; run the same command again"):
        build_shards(config, built.tokenizer, change)
    assert not (tmp_path / "shards").exists()
    build_shards(config, built.tokenizer)


def test_a_link_is_kept_and_its_target_is_replaced(built: Built, tmp_path):
    (tmp_path / "disk/shards").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/shards")
    for shard_tokens in (900, 800):
        config = prep_config(Path(built.config.corpus.source), tmp_path / "link", shard_tokens=shard_tokens)
        build_shards(config, built.tokenizer)
        assert (tmp_path / "link").is_symlink()
        assert Shards.open(tmp_path / "link").manifest["settings"]["shard_tokens"] == shard_tokens
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["shards"]


def test_a_kill_while_publishing_is_recovered(built: Built, tmp_path):
    shards, old = tmp_path / "shards", tmp_path / ".shards.old"
    build_shards(prep_config(Path(built.config.corpus.source), shards), built.tokenizer)
    whole = files(shards)
    shutil.copytree(shards, old)
    recover_folder(shards)
    assert not old.exists()
    shards.rename(old)
    recover_folder(shards)
    assert not old.exists()
    assert files(shards) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize("change", ["corpus", "settings", "tokens"])
def test_a_different_build_is_not_resumed(built: Built, tmp_path, change):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(Path(built.config.corpus.source).read_bytes())
    config = prep_config(corpus, tmp_path / "shards")
    with pytest.raises(StoppedError):
        build_shards(config, built.tokenizer, stop_after(8))
    aside = building_folder(tmp_path / "shards")
    if change == "corpus":
        os.utime(corpus, (1, 1))
    elif change == "settings":
        config = prep_config(corpus, tmp_path / "shards", shard_tokens=1999)
    else:
        (aside / "train_00000.bin").write_bytes(b"")
        with pytest.raises(DataError, match=r"train_00000\.bin: shorter than at the last commit; delete"):
            build_shards(config, built.tokenizer)
        return
    seen: list[BuildProgress] = []
    build_shards(config, built.tokenizer, seen.append)
    assert seen[0].documents == 0
    Shards.open(tmp_path / "shards").verify()


def test_a_finished_build_is_published_without_reading(built: Built, tmp_path):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards")
    build_shards(config, built.tokenizer)
    whole = files(tmp_path / "shards")
    (tmp_path / "shards").rename(building_folder(tmp_path / "shards"))
    build_shards(config, built.tokenizer, stop_after(0))  # no block is read
    assert files(tmp_path / "shards") == whole


def corpus_with_bad_rows(folder: Path, bad: int) -> Path:
    rows = [json.dumps({"text": text}) for text in TEXTS]
    for number in range(bad):
        rows[7 * number] = "{" if number % 2 else json.dumps({"body": "x"})
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_bad_rows_are_counted_logged_and_skipped(built: Built, tmp_path):
    corpus = corpus_with_bad_rows(tmp_path, 8)
    config = prep_config(corpus, tmp_path / "shards", max_bad_fraction=0.1)
    manifest = build_shards(config, built.tokenizer)
    assert manifest["rows"] == {"read": 80, "bad": 8, "left_out": 0}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 72
    logged = Shards.open(tmp_path / "shards").bad_rows()
    assert [row["where"] for row in logged] == [f"{corpus}, line {7 * number + 1}" for number in range(8)]
    assert "corpus.text_field" in logged[0]["reason"]


def test_too_many_bad_rows_end_the_build_and_a_higher_limit_resumes_it(built: Built, tmp_path):
    corpus = corpus_with_bad_rows(tmp_path, 8)
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 1: .*; 8 of 80 rows cannot be read .*max_bad_fraction"):
        build_shards(prep_config(corpus, tmp_path / "shards", max_bad_fraction=0.09), built.tokenizer)
    with pytest.raises(DataError, match=r"; \d of \d+ rows"):
        build_shards(prep_config(corpus, tmp_path / "strict", max_bad_fraction=0), built.tokenizer)
    assert len((building_folder(tmp_path / "shards") / "bad_rows.jsonl").read_text().splitlines()) == 8
    seen: list[BuildProgress] = []
    build_shards(prep_config(corpus, tmp_path / "shards", max_bad_fraction=0.1), built.tokenizer, seen.append)
    assert seen[0].documents > 10


def test_a_full_disk_is_one_line_and_nothing_is_lost(built: Built, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "read_blocks", partial(read_blocks, block_bytes=50_000))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text((Path(built.config.corpus.source).read_text() + "\n") * 20)
    config = prep_config(corpus, tmp_path / "shards", shard_tokens=10**6)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(built.tokenizer.model_bytes) + 20_000, limits[1]))
        with pytest.raises(DataError, match=r"shards: cannot be written: .*large; free space .* to resume"):
            build_shards(config, built.tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert not (tmp_path / "shards").exists()
    seen: list[BuildProgress] = []
    build_shards(config, built.tokenizer, seen.append)
    assert seen[0].documents > 0
    build_shards(prep_config(corpus, tmp_path / "whole", shard_tokens=10**6), built.tokenizer)
    assert files(tmp_path / "shards") == files(tmp_path / "whole")


def test_a_dead_worker_is_one_line_and_the_build_resumes(built: Built, tmp_path):
    import psutil

    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards", workers=2)

    def kill_workers(now: BuildProgress) -> None:
        if now.documents > 20:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # killed before, and reaped meanwhile
                    if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline()):
                        child.kill()

    with pytest.raises(DataError, match=r"a tokenizing process died .* shards\.workers=1 "):
        build_shards(config, built.tokenizer, kill_workers)
    build_shards(config, built.tokenizer)
    assert files(tmp_path / "shards") == files(built.config.shards.folder)


def test_a_lock_that_is_a_link_is_not_followed(built: Built, tmp_path):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards")
    (tmp_path / "notes").write_text("kept")
    (tmp_path / ".shards.lock").symlink_to(tmp_path / "notes")
    with pytest.raises(ConfigError, match=r"the lock file \S+\.shards\.lock is a symbolic link; remove it"):
        build_shards(config, built.tokenizer)
    assert (tmp_path / "notes").read_text() == "kept"


def test_two_builds_of_one_folder_exclude_each_other(built: Built, tmp_path):
    config = prep_config(Path(built.config.corpus.source), tmp_path / "shards")

    def build_again(_: BuildProgress) -> None:
        with pytest.raises(DataError, match="another process is building it"):
            build_shards(config, built.tokenizer)
        raise StoppedError

    with pytest.raises(StoppedError):
        build_shards(config, built.tokenizer, build_again)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"valid_fraction": 0.00001}, "valid split; raise corpus.valid_fraction"),
        ({"valid_fraction": 0.0, "test_fraction": 0.99999}, "train split; lower corpus.valid_fraction"),
        ({"min_characters": 10**6}, "no text in any document"),
    ],
)
def test_an_empty_split_is_refused(built: Built, tmp_path, settings, problem):
    with pytest.raises(DataError, match=problem):
        build_shards(prep_config(Path(built.config.corpus.source), tmp_path / "new", **settings), built.tokenizer)
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_files_is_never_replaced(built: Built, tmp_path):
    own = [tmp_path / name for name in ("thesis.txt", "megatron/train_text_document.bin", "nanogpt/train.bin")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
    for target, problem in ((own[0], "is a file"), *((path.parent, "contains other files") for path in own)):
        with pytest.raises(DataError, match=problem):
            build_shards(prep_config(Path(built.config.corpus.source), target), built.tokenizer)
    assert {path.read_text() for path in own} == {"years of work"}
