"""Files at URLs: the same batches as from local files, a cache within its limit, and one line for what fails."""

import gzip
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from builds import TEXTS, Built, corpus, prep_config, read, refusal
from hand_made import batches_of
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.hf_api import RepoFile, RepoFolder
from pyarrow import parquet

from tost_lm import remote
from tost_lm.config import load_config
from tost_lm.data import shard_format, shards
from tost_lm.data.loader import Corpora
from tost_lm.data.prefetch import micro_batches, prefetched
from tost_lm.data.shards import Shards
from tost_lm.data.sources import Document, count_rows, fingerprint
from tost_lm.data.sources.files import corpus_files
from tost_lm.data.stages import Packing
from tost_lm.data_prep.build import build_shards
from tost_lm.errors import ConfigError, DataError, StorageError
from tost_lm.pretrain.sections import TrainingDataConfig
from tost_lm.remote import (
    RemotePath,
    as_path,
    fetch_folder,
    glob_files,
    list_files,
    local_copy,
    remove_folder,
    upload_folder,
)

pytestmark = pytest.mark.quick

BLOCK = 500
PACKINGS: tuple[Packing, ...] = ("concatenated", "best-fit")


@pytest.fixture(scope="module")
def local(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shards whose blocks have 250 tokens."""
    folder = tmp_path_factory.mktemp("local") / "shards"
    with pytest.MonkeyPatch.context() as changed:
        for module in (shard_format, shards):
            changed.setattr(module, "HASH_BLOCK_BYTES", BLOCK)
        build_shards(prep_config(Path(built.config.corpus.source), folder), built.tokenizer)
        yield folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(local: Path, memory: Any) -> RemotePath:
    memory.put(f"{local}/", "/bucket/shards/", recursive=True)
    return as_url("memory://bucket/shards")


def as_url(text: str) -> RemotePath:
    url = as_path(text)
    assert isinstance(url, RemotePath)
    return url


def blocks(cache: Path) -> list[Path]:
    return sorted((cache / "blocks").glob("*/*"))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_local_files(local: Path, url: RemotePath, packing: Packing, workers: int):
    at_url, at_home = (batches_of(Corpora.open({folder: 1.0}), packing) for folder in (url, local))
    steps = range(30)
    expected = [micro_batches(at_home[step], torch.device("cpu")) for step in steps]  # pyright: ignore[reportArgumentType]
    with prefetched(at_url, steps, workers, torch.device("cpu")) as numbered:
        for (_, found), wanted in zip(numbered, expected, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.tokens, other.tokens)
                assert torch.equal(one.labels, other.labels)


def test_loss_masks_are_those_of_local_files(
    built: Built, memory: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (shard_format, shards):
        monkeypatch.setattr(module, "HASH_BLOCK_BYTES", BLOCK)
    rows = [{"prompt": text, "completion": f"word {number}"} for number, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    build_shards(prep_config(tmp_path / "rows.jsonl", tmp_path / "local"), built.tokenizer)
    memory.put(f"{tmp_path / 'local'}/", "/bucket/shards/", recursive=True)
    url = as_url("memory://bucket/shards")
    at_url, at_home = (batches_of(Corpora.open({folder: 1.0}), "best-fit") for folder in (url, tmp_path / "local"))
    for step in range(5):
        for one, other in zip(at_url[step], at_home[step], strict=True):
            assert np.array_equal(one, other)
    assert not [*cache.rglob("*.loss_mask")]  # read by blocks, not copied
    Shards.open(url).verify()
    name = "train_00000.loss_mask"
    damaged(memory, name, bytes(memory.size(f"/bucket/shards/{name}")))
    shutil.rmtree(cache)
    with pytest.raises(DataError, match=rf"^memory://bucket/shards/{name}: damaged between bytes 0 and "):
        Shards.open(url).loss_masks("train")[0][:10]


def test_blocks_are_fetched_on_their_first_use_only(local: Path, url: RemotePath, memory: Any, cache: Path):
    opened = Shards.open(url)
    assert not blocks(cache)
    tokens = opened.token_arrays("train")[1]
    assert tokens[300:310].tolist() == Shards.open(local).token_arrays("train")[1][300:310].tolist()
    assert [path.stat().st_size for path in blocks(cache)] == [BLOCK]
    opened.verify("train")
    whole = [array[:] for array in opened.token_arrays("train")]
    assert len(blocks(cache)) == sum(-(-2 * len(array) // BLOCK) for array in whole)
    for name in memory.ls("/bucket/shards", detail=False):
        if name.endswith(".bin"):
            memory.store[name] = type(memory.store[name])(memory, name, bytes(memory.size(name)))
    again = Shards.open(url)
    for one, other in zip(again.token_arrays("train"), whole, strict=True):
        assert np.array_equal(one[:], other)


def test_a_small_cache_stays_below_its_limit(
    local: Path, url: RemotePath, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """A block that was removed is fetched again."""
    monkeypatch.setattr(remote, "BUCKETS", 1)  # so that there are enough blocks for each
    monkeypatch.setenv("TOST_CACHE_GB", str(2 * 4 * BLOCK / 1e9))
    monkeypatch.setattr(remote.RemoteBlock, "cached", property(lambda block: f"{cache}/blocks/00/{block.xxh3}"))
    at_url, at_home = (batches_of(Corpora.open({folder: 1.0}), "best-fit") for folder in (url, local))
    for step in (*range(20), *range(20)):
        for one, other in zip(at_url[step], at_home[step], strict=True):
            assert np.array_equal(one, other)
        assert sum(path.stat().st_size for path in blocks(cache)) <= 4 * BLOCK


def damaged(memory: Any, name: str, data: bytes) -> None:
    memory.pipe_file(f"/bucket/shards/{name}", data)


def test_a_wrong_object_is_named(url: RemotePath, memory: Any, cache: Path):
    name = "train_00001.bin"
    data = memory.cat_file(f"/bucket/shards/{name}")
    damaged(memory, name, data[:700] + bytes(2) + data[702:])
    tokens = Shards.open(url).token_arrays("train")[1]
    assert len(tokens[:250]) == 250
    with pytest.raises(StorageError, match=rf"^memory://bucket/shards/{name}: damaged between bytes 500 and 1,000, "):
        tokens[300:310]
    assert len(blocks(cache)) == 1
    damaged(memory, name, data[:-1])
    with pytest.raises(DataError, match=rf"^memory://bucket/shards/{name}: damaged, {len(data) - 1} bytes instead of"):
        Shards.open(url)
    memory.rm(f"/bucket/shards/{name}")
    with pytest.raises(DataError, match=rf"^memory://bucket/shards/{name}: missing"):
        Shards.open(url)


def test_a_wrong_index_is_named_and_not_kept(url: RemotePath, memory: Any, cache: Path):
    name = "train_00000.idx"
    data = memory.cat_file(f"/bucket/shards/{name}")
    damaged(memory, name, data[:-1] + b"\1")
    with pytest.raises(DataError, match=rf"^memory://bucket/shards/{name}: damaged, its hash differs"):
        Shards.open(url)
    assert not [*(cache / "copies").glob("*/shards")]
    damaged(memory, name, data)
    assert Shards.open(url).lengths("train")


def test_a_damaged_block_of_the_cache_is_fetched_again(local: Path, url: RemotePath, cache: Path):
    Shards.open(url).verify("train")
    for path in blocks(cache):
        path.write_bytes(bytes(path.stat().st_size))
    for one, other in zip(
        Shards.open(url).token_arrays("train"), Shards.open(local).token_arrays("train"), strict=True
    ):
        assert np.array_equal(one[:], other[:])


def test_a_cached_block_that_is_no_file(url: RemotePath, cache: Path):
    Shards.open(url).verify("train")
    first, second, *_ = blocks(cache)
    first.unlink()
    os.mkfifo(first)
    Shards.open(url).verify("train")
    assert first.is_file()
    second.unlink()
    second.mkdir()
    with pytest.raises(StorageError, match=rf"^{second}: cannot be written: Is a directory; clear the cache, or set"):
        Shards.open(url).verify("train")


def test_a_cache_without_a_home_is_one_line(url: RemotePath, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOST_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody in /etc/passwd
    with pytest.raises(StorageError, match=r"^the cache has no folder: HOME is not set, .*; set TOST_CACHE to a "):
        Shards.open(url)


def test_no_such_folder_and_no_such_package_are_one_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageError, match=r"^memory://nowhere: no such file or folder; correct the URL$"):
        Shards.open(as_path("memory://nowhere"))
    with pytest.raises(StorageError, match=r"^s3://bucket/x\?versionId=1: versions of objects are not supported; rem"):
        list_files(as_url("s3://bucket/x?versionId=1"))  # s3fs would read, write and remove s3://bucket/x
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        StorageError, match=r"^s3://bucket/x: the package s3fs is not installed; run pip install '\.\[rem"
    ):
        Shards.open(as_path("s3://bucket/x"))


def test_pages_are_no_storage():
    with pytest.raises(ConfigError, match="folder: such URLs are not supported: https://host/x; give"):
        load_config(TrainingDataConfig, None, ["folder=https://host/x"])


def test_urls_of_settings_are_kept_as_they_are():
    for text in ("s3://bucket/a b/shards", "file:///a/b", "memory://x"):
        found = load_config(TrainingDataConfig, None, [f"folder={text}"])
        assert found.model_dump(mode="json")["folder"] == text
        assert [*map(str, found.folders)] == [text]
    mixture = load_config(TrainingDataConfig, None, ['mixture={"s3://bucket/a" = 1.0, b = 2.0}'])
    assert [*map(str, mixture.folders)] == ["s3://bucket/a", "b"]


def test_copies_of_files_and_folders(memory: Any, cache: Path):
    for name in ("one/a.txt", "one/b.txt", "one/deep/c.txt", "two.txt"):
        memory.pipe_file(f"/bucket/{name}", name.encode())
    folder = local_copy(as_url("memory://bucket/one"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a.txt": "one/a.txt", "b.txt": "one/b.txt"}
    assert folder.name == "one"
    assert local_copy(as_url("memory://bucket/one")) == folder
    assert local_copy(as_url("memory://bucket/two.txt")).read_text() == "two.txt"
    memory.pipe_file("/bucket/one/a.txt", b"other")
    assert (local_copy(as_url("memory://bucket/one")) / "a.txt").read_text() == "other"
    assert [*list_files(as_url("memory://bucket/one"), deep=True)] == ["a.txt", "b.txt", "deep/c.txt"]
    assert [*glob_files(as_url("memory://bucket/**/*.txt"))] == ["one/a.txt", "one/b.txt", "one/deep/c.txt", "two.txt"]
    assert [*glob_files(as_url("memory://bucket/one/[a-b].txt"))] == ["a.txt", "b.txt"]
    memory.pipe_file("/bucket/one/.c.txt", b"hidden")
    assert [file.name for file in corpus_files("memory://bucket/one/*.txt")] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["exp[1]", "exp*", "ex?1", "exp[!2]", "exp::memory", "e%78p1"])
@pytest.mark.parametrize("storage", ["memory://bucket", "file://"])
def test_paths_are_literal(storage: str, name: str, tmp_path: Path, memory: Any):
    """fsspec expands `*`, `?` and `[` of most paths, and chains file systems at `::`."""
    bucket, given = storage + ("" if storage.startswith("memory") else str(tmp_path)), tmp_path / "given"
    given.mkdir()
    for file in ("a.txt", "manifest.json"):
        (given / file).write_text(file)
    url, other = (as_url(f"{bucket}/{folder}") for folder in (name, "exp1"))
    upload_folder(given, other, "manifest.json")
    others = list_files(other)
    with pytest.raises(StorageError, match="no such file"):
        local_copy(url)
    for _ in range(2):
        upload_folder(given, url, "manifest.json")
    assert [*list_files(url)] == sorted(path.name for path in local_copy(url).iterdir()) == ["a.txt", "manifest.json"]
    assert local_copy(url / "a.txt").read_text() == "a.txt"
    assert {file.path.parent for file in corpus_files(str(url))} == {url}
    fetch_folder(url, tmp_path / "back" / name)
    remove_folder(url, "manifest.json")
    assert not list_files(url)
    assert list_files(other) == others


def test_copies_that_are_not_in_use_make_room(memory: Any, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOST_CACHE_GB", str(2 * 2500 / 1e9))
    for name in "abc":
        memory.pipe_file(f"/bucket/{name}", bytes(1000))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        used, unused = (pool.apply(local_copy, [as_url(f"memory://bucket/{name}")]) for name in "ab")
        del used
        kept = local_copy(as_url("memory://bucket/a"))
        pool.terminate()
        pool.join()
    remote._held.pop(unused.parents[1], None)
    local_copy(as_url("memory://bucket/c"))
    assert kept.exists()
    assert not unused.exists()


def _copy_at_once(url: str, start: Any) -> str:
    start.wait()
    return str(local_copy(as_path(url)))


def test_many_processes_make_one_copy(tmp_path: Path, cache: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(os.urandom(1 << 22))
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, context.Pool(8) as pool:
        start = manager.Event()
        pending = [pool.apply_async(_copy_at_once, (f"file://{tmp_path}/source", start)) for _ in range(8)]
        start.set()
        (copy,) = {one.get() for one in pending}
    assert Path(copy, "file").read_bytes() == (tmp_path / "source/file").read_bytes()
    assert [path.name for path in (cache / "copies").glob("*/[a-z]*")] == ["source"]


def test_an_interrupted_upload_is_not_complete(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch):
    folder, url = tmp_path / "step", as_url("memory://bucket/step")
    folder.mkdir()
    for name in ("a", "manifest.json", "z"):
        (folder / name).write_text(name)
    upload_folder(folder, url, "manifest.json")
    put = type(memory).put_file

    def put_until_z(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith("z"):
            raise ConnectionResetError("reset by peer")
        put(self, source, target, **options)

    monkeypatch.setattr(type(memory), "put_file", put_until_z)
    with pytest.raises(StorageError, match=r"^memory://bucket/step: reset by peer; check"):
        upload_folder(folder, url, "manifest.json")
    assert [*list_files(url)] == ["a", "z"]
    monkeypatch.undo()
    upload_folder(folder, url, "manifest.json")
    fetch_folder(url, tmp_path / "back")
    assert {path.name: path.read_text() for path in (tmp_path / "back").iterdir()} == {
        name: name for name in ("a", "manifest.json", "z")
    }
    shutil.rmtree(folder)


def test_corpora_at_urls_are_those_of_local_files(tmp_path: Path, memory: Any):
    folder, texts = tmp_path / "corpus", [f"text {number} " * number for number in range(1, 40)]
    (folder / "deep").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.json").write_bytes(lines)
    (folder / "deep/d.txt").write_text(texts[-1])
    parquet.write_table(pyarrow.table({"text": texts}), folder / "e.parquet", row_group_size=7)
    for name in (".hidden.txt", "g.pdf"):
        (folder / name).write_text("{}")
    memory.put(f"{folder}/", "/bucket/corpus/", recursive=True)
    url = "memory://bucket/corpus"
    for source in ("", "/deep/*.txt", "/**/*.gz", "/e.parquet"):
        found = read(f"{url}{source}", block_bytes=300)
        assert found == read(f"{folder}{source}", block_bytes=300)
        assert found
        assert count_rows(corpus(f"{url}{source}")) == len(found)
    before = fingerprint(corpus(url))
    assert fingerprint(corpus(url)) == before
    memory.pipe_file("/bucket/corpus/deep/d.txt", b"other")
    assert fingerprint(corpus(url)) != before
    assert refusal(f"{url}/nothing").startswith(f"corpus.source {url}/nothing: no file that ends in .txt, ")
    assert refusal(f"{url}/g.pdf").startswith(f"corpus.source {url}/g.pdf: {url}/g.pdf has no supported format; ")


def test_a_dataset_of_the_hub_is_read_at_its_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub's answers are those of a folder; no test asks the hub itself."""
    asked, texts = [], ["one", "two", "three"]
    (tmp_path / "en").mkdir()
    (tmp_path / "README.md").write_text("about")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "en/0.parquet")

    def listed(api: HfApi, repository: str, folder: str, *, revision: str, **_: Any) -> Iterator[RepoFile | RepoFolder]:
        asked.append((repository, revision))
        if not (tmp_path / folder).is_dir():
            raise EntryNotFoundError("nothing there")
        for path in sorted((tmp_path / folder).iterdir()):
            facts: Any = {"path": path.relative_to(tmp_path).as_posix(), "oid": str(path.stat().st_mtime_ns)}
            yield RepoFolder(**facts) if path.is_dir() else RepoFile(**facts, size=path.stat().st_size)

    def opened(system: HfFileSystem, path: str, *_: Any, **__: Any) -> Any:
        resolved: Any = system.resolve_path(path)
        return (tmp_path / resolved.path_in_repo).open("rb")

    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "list_repo_tree", listed)
    monkeypatch.setattr(HfFileSystem, "_open", opened)
    branch = "hf://datasets/someone/words@refs/convert/parquet"
    for source in (f"{branch}/en", f"{branch}/**/*.parquet", f"{branch}/en/0.parquet"):
        assert read(source) == [Document(row, text) for row, text in enumerate(texts)]
    assert {*asked} == {("someone/words", "refs/convert/parquet")}
    before = fingerprint(corpus(branch))
    os.utime(tmp_path / "en/0.parquet", (1, 1))
    assert fingerprint(corpus(branch)) != before
    assert "/de: no file that ends in .txt" in refusal(f"{branch}/de")
