"""Shards contain the corpus exactly, files are Megatron's, and damaged or foreign files are refused."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, reduce
from itertools import islice
from operator import getitem
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from builds import TEXTS, Built, prep_config
from hand_made import hand_made

from tost_lm.data import shard_format, shards
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shards import Concatenation, Shards
from tost_lm.data.sources import Splitter
from tost_lm.data_prep.build import build_shards
from tost_lm.errors import DataError
from tost_lm.files import manifest_bytes, manifest_content

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(built: Built, tmp_path: Path) -> Path:
    """A copy for tests that damage it."""
    return Path(shutil.copytree(built.config.shards.folder, tmp_path / "copy"))


def texts_of(built: Built, split: str) -> list[str]:
    splitter = Splitter(built.config.corpus, None)
    return [text for row, text in enumerate(TEXTS) if splitter.split_of(row, text) == split]


@pytest.mark.parametrize("split", SPLITS)
def test_documents_decode_to_the_sources(built, split):
    opened = Shards.open(built.config.shards.folder)
    tokenizer = opened.tokenizer()
    texts = [tokenizer.decode(ids.tolist()) for ids in opened.documents(split)]
    assert texts
    assert texts == texts_of(built, split)
    assert [ids.tolist() for ids in opened.documents(split)] == [*map(built.tokenizer.encode, texts)]
    assert opened.manifest["splits"][split]["documents"] == len(texts)
    assert all(tokenizer.eot not in ids for ids in opened.documents(split))


@pytest.mark.parametrize("first", [0, 1, 17, 40, 1000])
def test_documents_are_read_from_any_number(built, first):
    opened = Shards.open(built.config.shards.folder)
    expected = [tokens.tolist() for tokens in opened.documents("train")][first:]
    assert [tokens.tolist() for tokens in opened.documents("train", first)] == expected


@pytest.mark.parametrize("split", SPLITS)
def test_files_equal_megatrons_byte_for_byte(built, tmp_path, split):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    opened = Shards.open(built.config.shards.folder)
    documents = opened.documents(split)
    for entry in opened.entries(split):
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
        for tokens in islice(documents, entry["documents"]):
            builder.add_document(torch.tensor([*tokens.tolist(), opened.eot]), [len(tokens) + 1])
        builder.finalize(str(tmp_path / "theirs.idx"))
        for ending in ("bin", "idx"):
            ours = opened.folder / f"{entry['name']}.{ending}"
            assert (tmp_path / f"theirs.{ending}").read_bytes() == ours.read_bytes()
    assert next(documents, None) is None


def test_the_manifest_has_the_counts_of_the_shards(built):
    opened = Shards.open(built.config.shards.folder)
    manifest = built.manifest
    assert opened.manifest == manifest
    eot = built.tokenizer.eot
    assert manifest["tokenizer"] == {"sha256": built.tokenizer.sha256, "vocab_size": 300, "eot": eot}
    assert (opened.vocab_size, opened.eot) == (300, eot)
    assert manifest["rows"] == {"read": len(TEXTS), "bad": 0, "left_out": 0}
    for split in SPLITS:
        entry = manifest["splits"][split]
        arrays = opened.token_arrays(split)
        assert [len(array) for array in arrays] == [shard["tokens"] for shard in entry["shards"]]
        assert [int(lengths.sum()) for lengths in opened.lengths(split)] == [len(array) for array in arrays]
        assert entry["tokens"] == sum(map(len, arrays))
        assert entry["bytes"] == sum(len(text.encode()) for text in texts_of(built, split))
        assert entry["documents"] == sum(int((array[:] == eot).sum()) for array in arrays)
    assert len(manifest["splits"]["train"]["shards"]) > 2
    for split in SPLITS:
        for entry, lengths in zip(opened.entries(split), opened.lengths(split), strict=True):
            assert entry["tokens"] - lengths[-1] < 900  # only the last document fills the shard
        assert all(shard["tokens"] >= 900 for shard in opened.entries(split)[:-1])
    opened.verify()


def test_the_fingerprint_identifies_the_tokens(built, tmp_path):
    opened = Shards.open(built.config.shards.folder)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(built.config.corpus.source).read_bytes())
    build_shards(prep_config(moved, tmp_path / "shards"), built.tokenizer)
    assert Shards.open(tmp_path / "shards").fingerprint == opened.fingerprint
    build_shards(prep_config(moved, tmp_path / "other", shard_tokens=3000), built.tokenizer)
    assert Shards.open(tmp_path / "other").fingerprint != opened.fingerprint


def test_flipped_bits_and_truncations_are_refused(folder, record_fault):
    """200 damages over all files; the error names the file."""
    draws = random.Random(0)
    names = sorted(path.name for path in folder.iterdir())
    for number in range(200):
        path = folder / names[number % len(names)]
        whole = path.read_bytes()
        place = draws.randrange(len(whole))
        if number % 4:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draws.randrange(8)
        else:
            damaged = whole[:place]
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            Shards.open(folder).verify()
        line = str(caught.value)
        assert line.startswith(str(path)) or (path.name == "manifest.json" and line.startswith(str(folder)))
        assert "\n" not in line
        path.write_bytes(whole)
    Shards.open(folder).verify()
    record_fault("a flipped bit in a shard, or a truncated shard", 200, "refused; the error names the file")


def test_every_reader_checks_a_block_before_its_first_use(built, tmp_path, monkeypatch):
    for module in (shard_format, shards):
        monkeypatch.setattr(module, "HASH_BLOCK_BYTES", 500)
    build_shards(prep_config(Path(built.config.corpus.source), tmp_path / "shards"), built.tokenizer)
    path = tmp_path / "shards/train_00000.bin"
    opened = Shards.open(tmp_path / "shards")
    tokens, other = opened.token_arrays("train")[0], opened.token_arrays("train")[0]
    before = tokens[250:500].tolist()
    data = bytearray(path.read_bytes())
    data[750] ^= 1
    path.write_bytes(data)
    assert tokens[250:500].tolist() != before  # checked before: not seen
    assert len(tokens[500:]) == len(tokens) - 500
    assert len(other[:250]) == 250
    for read in (
        lambda: other[249:251], lambda: list(opened.documents("train")),
        lambda: Concatenation([other]).read(np.array([200]), np.array([100]), np.int32), opened.verify,
    ):  # fmt: skip
        with pytest.raises(DataError, match=r"train_00000\.bin: damaged between bytes 500 and 1,000"):
            read()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"train_00000\.bin: damaged, {len(data) - 1} bytes instead of {len(data)}"):
        _ = other[600:700]


def test_a_file_that_is_truncated_or_removed_after_its_check_is_refused(tmp_path: Path):
    tokens, path = hand_made(tmp_path, [200]).token_arrays("train")[0], tmp_path / "train_00000.bin"
    before = tokens[:].tolist()
    os.truncate(path, 400)
    assert tokens[:100].tolist() == before[:100]
    with pytest.raises(DataError, match=rf"^{path}: damaged, 400 bytes instead of 800; rebuild"):
        _ = tokens[90:110]
    path.unlink()
    shards._opened.cache_clear()
    with pytest.raises(DataError, match=rf"^{path}: missing; rebuild"):
        _ = tokens[:100]


def test_threads_read_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_opened", lru_cache(1)(shards._opened.__wrapped__))
    arrays = hand_made(tmp_path, [100] * 20, shard_tokens=100).token_arrays("train")
    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(lambda number: arrays[number % 20][10:60].tolist(), range(4000))):
            assert found == [*range(100 * (number % 20) + 11, 100 * (number % 20) + 61)]
    assert len([file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]) == 1


def test_wrong_and_missing_tokenizers_are_refused(folder):
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="wrong tokenizer for the shards"):
        Shards.open(folder)
    path.unlink()
    with pytest.raises(DataError, match="tokenizer"):
        Shards.open(folder)


@pytest.mark.parametrize(
    ("section", "field", "value", "problem"),
    [
        ([], "format", "tost_lm.shards.v2", r"\(format: .*rebuild the shards"),
        ([], "dtype", "float64", r"\(dtype"),
        (["tokenizer"], "\x1b[2J\n", 1, r"\(tokenizer\."),
        (["splits", "valid", "shards", 0], "name", "../train_00000", r"shards\.0\.name"),
        (["splits", "valid", "shards", 0], "tokens", -1, r"shards\.0\.tokens"),
    ],
)
def test_a_manifest_of_another_form_is_refused_in_one_line(folder, section, field, value, problem):
    tree = json.loads(manifest_content((folder / "manifest.json").read_bytes()) or b"")
    reduce(getitem, section, tree)[field] = value
    (folder / "manifest.json").write_bytes(manifest_bytes(tree))
    with pytest.raises(DataError, match=problem) as caught:
        Shards.open(folder)
    assert str(caught.value).startswith(f"{folder}/manifest.json: not tost_lm.shards.v3 (")
    assert str(caught.value).isprintable()


def test_other_folders_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="not a shard folder"):
            Shards.open(path)
