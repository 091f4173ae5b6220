"""Shards hold the corpus exactly, Megatron reads the same tokens, and anything damaged or foreign is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shard_format import dtype_for, index_bytes
from tost_lm.data.shards import Shards, build_shards
from tost_lm.data.sources import documents, is_heldout
from tost_lm.data.tokenizers import Tokenizer, train_tokenizer
from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes

SPLITS = ("train", "valid")
HELDOUT_SHARE = 0.2


def config(corpus: Path, shards: Path, heldout_share: float = HELDOUT_SHARE) -> DataPrepConfig:
    tree = {
        "corpus": {"source": str(corpus), "heldout_share": heldout_share},
        "tokenizer": {"path": "unused", "vocab_size": 300},
        "shards": {"folder": str(shards), "shard_tokens": 2000},
    }
    return DataPrepConfig.model_validate_json(json.dumps(tree))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[DataPrepConfig, Tokenizer, dict]:
    folder = tmp_path_factory.mktemp("built")
    texts = [f"document {number}:\u2581" + " naïve \r\n😀\0" * (number % 7) + "word " * number for number in range(80)]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(train_tokenizer(texts * 20, 300))
    settings = config(folder / "corpus.jsonl", folder / "shards")
    return settings, tokenizer, build_shards(settings, tokenizer, lambda *_: None)


@pytest.fixture
def folder(built, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(built[0].shards.folder, tmp_path / "copy"))


def sources(settings: DataPrepConfig, split: str) -> list[str]:
    return [
        document.text
        for document in documents(settings.corpus)
        if is_heldout(document.name, HELDOUT_SHARE) == (split == "valid")
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_documents_decode_to_the_sources(built, split):
    settings, _, _ = built
    shards = Shards.open(settings.shards.folder)
    tokenizer = shards.tokenizer()
    texts = [tokenizer.decode(ids.tolist()) for ids in shards.documents(split)]
    assert texts == sources(settings, split)
    assert shards.manifest["splits"][split]["documents"] == len(texts)
    assert all(tokenizer.eot not in ids for ids in shards.documents(split))


@pytest.mark.parametrize("split", SPLITS)
def test_megatron_reads_the_same_tokens(built, split):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    settings, tokenizer, manifest = built
    texts = iter(sources(settings, split))
    for entry in manifest["splits"][split]["shards"]:
        dataset = IndexedDataset(str(settings.shards.folder / entry["name"]))
        assert dataset.index.dtype is np.uint16
        assert dataset.document_indices.tolist() == list(range(entry["documents"] + 1))
        for number in range(len(dataset)):
            assert np.asarray(dataset[number]).tolist() == [*tokenizer.encode(next(texts)), tokenizer.eot]
    assert next(texts, None) is None


def test_manifest_counts_what_is_there(built):
    settings, tokenizer, manifest = built
    shards = Shards.open(settings.shards.folder)
    assert shards.manifest == manifest
    assert shards.fingerprint == sha256_bytes((settings.shards.folder / "manifest.json").read_bytes())
    assert manifest["tokenizer"] == {"sha256": tokenizer.sha256, "vocab_size": 300, "eot": tokenizer.eot}
    assert (shards.vocab_size, shards.eot) == (300, tokenizer.eot)
    for split in SPLITS:
        entry = manifest["splits"][split]
        arrays = shards.token_arrays(split)
        assert [len(array) for array in arrays] == [shard["tokens"] for shard in entry["shards"]]
        assert entry["tokens"] == sum(map(len, arrays))
        assert entry["bytes"] == sum(len(text.encode()) for text in sources(settings, split))
        assert entry["documents"] == sum(int((array == tokenizer.eot).sum()) for array in arrays)
    assert len(manifest["splits"]["train"]["shards"]) > 2
    assert all(shard["tokens"] >= 2000 for shard in manifest["splits"]["train"]["shards"][:-1])
    shards.verify()


def test_building_again_gives_the_same_bytes(built, tmp_path):
    settings, tokenizer, manifest = built
    calls: list[tuple[int, int, int]] = []
    other = config(Path(settings.corpus.source), tmp_path / "again")
    assert build_shards(other, tokenizer, lambda *counts: calls.append(counts)) == manifest
    for file in settings.shards.folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    totals = [manifest["splits"][split] for split in SPLITS]
    assert calls[0] == (0, 0, 0)
    assert calls[-1] == tuple(sum(total[what] for total in totals) for what in ("documents", "bytes", "tokens"))


@pytest.mark.parametrize(
    ("name", "place"),
    [("train_00001.bin", 77), ("valid_00000.bin", 0), ("train_00000.idx", 60), ("train_00000.idx", -1)],
)
def test_flipped_byte_is_found_by_verify(folder, name, place):
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: damaged"):
        Shards.open(folder).verify()


@pytest.mark.parametrize("place", [0, 9, 17, 18, 26, 34, -400])
def test_flipped_byte_in_an_index_is_refused_when_read(folder, place):
    path = folder / "train_00000.idx"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train_00000\.idx: damaged"):
        list(Shards.open(folder).documents("train"))


@pytest.mark.parametrize("name", ["train_00000.bin", "valid_00000.idx"])
def test_truncated_and_missing_files_are_refused_on_opening(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(DataError, match=f"{name}: damaged, {len(data) - 1} bytes where the manifest says {len(data)}"):
        Shards.open(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        Shards.open(folder)


def test_wrong_tokenizer_is_refused(folder, built):
    (folder / "tokenizer.model").write_bytes(train_tokenizer(["another text " * 50, "words " * 9], 266 + 4))
    with pytest.raises(DataError, match="wrong tokenizer for the shards"):
        Shards.open(folder)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model: missing"):
        Shards.open(folder)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("tost_lm.shards.v1", "tost_lm.shards.v2", r"not tost_lm\.shards\.v1 \(format:"),
        ('"eot": 1', '"eot": "one"', r"\(tokenizer\.eot:"),
        ('"eot"', '"end"', r"\(tokenizer\."),
        ("}", "", r"\(JSON:"),
    ],
)
def test_manifest_of_another_kind_is_refused(folder, old, new, problem):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=problem) as caught:
        Shards.open(folder)
    assert "\n" not in str(caught.value)


def test_other_folders_are_no_shards(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="not a shard folder"):
            Shards.open(path)


@pytest.mark.parametrize(("share", "problem"), [(0.0, "valid split; raise it"), (0.99999, "train split; lower it")])
def test_empty_split_is_refused_and_leaves_nothing(built, tmp_path, share, problem):
    settings, tokenizer, _ = built
    with pytest.raises(DataError, match=problem):
        build_shards(config(Path(settings.corpus.source), tmp_path / "new", share), tokenizer, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_folder_with_other_files_is_never_replaced(built, tmp_path):
    settings, tokenizer, _ = built
    (tmp_path / "thesis.txt").write_text("years of work")
    for target, problem in ((tmp_path, "holds other files"), (tmp_path / "thesis.txt", "is a file")):
        with pytest.raises(DataError, match=problem):
            build_shards(config(Path(settings.corpus.source), target), tokenizer, lambda *_: None)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_formats_of_ids_and_indices():
    assert [dtype_for(size) for size in (300, 65_536, 65_537)] == ["uint16", "uint16", "int32"]
    assert index_bytes(1) == 34 + 12 + 16
