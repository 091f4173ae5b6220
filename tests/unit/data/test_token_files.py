"""Token files that Megatron's own builder wrote are used in place: its reader has the same documents."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builds import Built, prep_config
from hand_made import batches_of

from tost_lm.data.loader import Corpora
from tost_lm.data.shards import Shards
from tost_lm.data_prep import build
from tost_lm.errors import ConfigError, DataError

pytestmark = pytest.mark.quick
LENGTHS = [[7], [3, 0, 40], [], [1], [250, 1, 9, 9], [0], *([number % 17 + 1, 4] for number in range(40))]
"""Tokens of each sequence of each document."""


def write(prefix: Path, dtype: Any, eot: int | None = None, seed: int = 0) -> Path:
    """Token files of documents with these lengths; with `eot`, each ends with it."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draws, builder = np.random.default_rng(seed), IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for lengths in LENGTHS:
        tokens = draws.integers(2, 300, sum(lengths))
        tokens[-1:] = tokens[-1:] if eot is None else eot
        builder.add_document(torch.from_numpy(tokens), lengths)
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_by_megatron(prefix: Path) -> Iterator[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices.tolist()
    for first, end in pairwise(bounds):
        yield [token for number in range(first, end) for token in np.asarray(dataset[number]).tolist()]


def linked(built: Built, source: Path, folder: Path) -> Shards:
    build.build_shards(prep_config(source, folder), built.tokenizer)
    return Shards.open(folder)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_are_those_of_megatrons_reader(built, tmp_path, dtype, ends):
    prefixes = [write(tmp_path / f"{name}_text", dtype, 1 if ends else None, seed) for seed, name in enumerate("ab")]
    shards = linked(built, tmp_path / "*.idx", tmp_path / "shards")
    found = {split: list(map(np.ndarray.tolist, shards.documents(split))) for split in ("train", "valid", "test")}
    expected: dict[str, list[list[int]]] = {split: [] for split in found}
    for prefix in prefixes:
        documents = [tokens[: len(tokens) - ends] for tokens in read_by_megatron(prefix) if tokens]
        first, second = round(0.7 * len(documents)), round(0.9 * len(documents))
        for split, some in zip(expected, (slice(first), slice(first, second), slice(second, None)), strict=True):
            expected[split] += documents[some]
    assert found == expected
    assert shards.manifest["dtype"] == np.dtype(dtype).name
    assert shards.manifest["rows"] == {"read": 2 * len(LENGTHS), "bad": 0, "left_out": 4}
    assert sum(lengths.sum() for split in found for lengths in shards.lengths(split)) == 2 * sum(map(sum, LENGTHS))
    shards.verify()


def test_weighted_token_files_are_batches_of_their_tokens(built, tmp_path):
    """Every token of a batch is that of the file, at the ratio of the mixture."""
    folders = [linked(built, write(tmp_path / name, np.int32, 1, seed), tmp_path / f"shards_{name}")
               for seed, name in enumerate("ab")]  # fmt: skip
    corpora = Corpora(folders, [3.0, 1.0])
    batches = batches_of(corpora, "concatenated", global_batch_size=100, micro_batch_size=1, seq_len=16)
    padding = [-100] * 15
    streams = [np.concatenate([a[:] for a in one.token_arrays("train")]).tolist() + padding for one in corpora.shards]
    names = [one.folder.name for one in corpora.shards]
    for corpus, row in zip(batches.corpora_of(0).tolist(), batches[0].labels[:, 0].tolist(), strict=True):
        assert any(streams[corpus][at : at + 16] == row for at in range(len(streams[corpus])))
    shares = [(batches.corpora_of(step) == names.index("shards_a")).sum() for step in range(100)]
    assert sum(shares) == 7500


def test_a_flipped_bit_is_found(built, tmp_path, monkeypatch):
    for module in ("shard_format", "shards"):
        monkeypatch.setattr(f"tost_lm.data.{module}.HASH_BLOCK_BYTES", 128)
    shards = linked(built, write(tmp_path / "a", np.uint16), tmp_path / "shards")
    shards.verify()
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[300] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"train_00000\.bin: damaged between bytes 256 and 384"):
        Shards.open(tmp_path / "shards").verify()


def test_ids_beyond_the_vocabulary_are_refused(built, tmp_path):
    prefix = write(tmp_path / "a", np.int32)
    tokens = np.fromfile(tmp_path / "a.bin", np.int32)
    tokens[-1] = 300
    tokens.tofile(tmp_path / "a.bin")
    shards = linked(built, prefix, tmp_path / "shards")
    with pytest.raises(DataError, match=rf"test_00000\.bin: token id 300 at byte {4 * len(tokens) - 4:,} is not in"):
        list(shards.documents("test"))


def header(position: str, value: int) -> Any:
    """A damage: another value at a position of the index's header."""
    formats = {"version": ("<Q", 9), "code": ("<B", 17), "sequences": ("<Q", 18), "documents": ("<Q", 26)}
    form, place = formats[position]
    return lambda data: struct.pack_into(form, data, place, value)


@pytest.mark.parametrize(
    ("ending", "damage", "problem"),
    [
        ("idx", lambda data: data.__delitem__(slice(-1, None)), r"a\.idx: damaged, \d+ bytes instead of \d+; .*copy"),
        ("idx", lambda data: data.__delitem__(slice(20, None)), r"a\.idx: not an index of Megatron's IndexedDataset"),
        ("idx", lambda data: data.clear(), r"a\.idx: not an index of Megatron's IndexedDataset"),
        ("idx", lambda data: data.__setitem__(0, 0), r"a\.idx: not an index of Megatron's IndexedDataset"),
        ("idx", header("version", 2), r"a\.idx: not an index of Megatron's IndexedDataset"),
        ("idx", header("code", 5), r"a\.idx: its tokens have type code 5; write them as uint16 \(8\) or int32"),
        ("idx", header("code", 4), r"a\.idx: damaged, its lengths, offsets and documents do not agree"),
        ("idx", header("sequences", 2**63), r"a\.idx: damaged, \d+ bytes instead of \d+"),
        ("idx", header("documents", 0), r"a\.idx: damaged, \d+ bytes instead of \d+"),
        ("idx", lambda data: data.__setitem__(34, 9), r"a\.idx: damaged, its lengths, offsets and documents do not"),
        ("idx", lambda data: data.__setitem__(-8, 0), r"a\.idx: damaged, its lengths, offsets and documents do not"),
        ("bin", lambda data: data.__delitem__(slice(-2, None)), r"a\.bin: damaged, \d+ bytes instead of \d+; copy"),
    ],
)  # fmt: skip
def test_damaged_and_foreign_files_are_refused_in_one_line(built, tmp_path, ending, damage, problem):
    prefix = write(tmp_path / "a", np.uint16)
    data = bytearray((tmp_path / f"a.{ending}").read_bytes())
    damage(data)
    (tmp_path / f"a.{ending}").write_bytes(data)
    with pytest.raises(DataError, match=problem) as caught:
        linked(built, prefix, tmp_path / "shards")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "shards").exists()


def test_a_missing_file_another_type_and_settings_of_text_are_refused(built, tmp_path):
    write(tmp_path / "a", np.uint16)
    write(tmp_path / "b", np.int32)
    with pytest.raises(DataError, match=r"b\.idx: tokens are int32, those of .*a\.idx uint16; give each its own"):
        linked(built, tmp_path / "*.idx", tmp_path / "shards")
    with pytest.raises(ConfigError, match=r"corpus\.min_characters: .*a has tokens and no text; remove the setting"):
        build.build_shards(prep_config(tmp_path / "a", tmp_path / "shards", min_characters=3), built.tokenizer)
    (tmp_path / "a.loss_mask").touch()
    with pytest.raises(DataError, match=r"a\.idx: its loss mask cannot be linked; add its folder to data\.mixture"):
        linked(built, tmp_path / "a", tmp_path / "shards")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin: No such file"):
        linked(built, tmp_path / "a", tmp_path / "shards")


def test_files_that_change_later_are_refused(built, tmp_path):
    prefix = write(tmp_path / "a", np.uint16)
    shards = linked(built, prefix, tmp_path / "shards")
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"train_00000\.bin: damaged, \d+ bytes instead of \d+"):
        Shards.open(tmp_path / "shards")
    write(tmp_path / "other", np.uint16)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[34] ^= 1
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(DataError, match=r"train_00000\.idx: damaged, its hash differs"):
        shards.lengths("train")
