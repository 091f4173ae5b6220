"""Corpora give their documents in a fixed order, and say in one line what cannot be read."""

import gzip
import json
import os
from pathlib import Path

import pytest

from tost_lm.data.config import CorpusConfig
from tost_lm.data.sources import Document, documents, fingerprint, is_heldout
from tost_lm.errors import DataError


def corpus(source: Path | str, **settings) -> CorpusConfig:
    return CorpusConfig.model_validate({"source": str(source), **settings})


def read(source: Path | str, **settings) -> list[Document]:
    return list(documents(corpus(source, **settings)))


def refusal(source: Path | str, **settings) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_embedded_is_large_named_and_the_same_every_time():
    found = read("embedded")
    names = [document.name for document in found]
    assert len(found) > 400
    assert sum(len(document.text.encode()) for document in found) > 5_000_000
    assert {"topics/assert", "stdlib/json/decoder.py"} <= set(names)
    assert len(set(names)) == len(names)
    assert not [name for name in names if {"site-packages", "test", "encodings", "pydoc_data"} & set(name.split("/"))]
    assert found == read("embedded")
    assert fingerprint(corpus("embedded")) == fingerprint(corpus("embedded"))


def test_folder_is_read_in_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/two.txt").write_bytes("zwei\r\n\ufeff".encode())
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}\n'))
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n{"text": ""}\n{"text": "\\ud83d\\ude00"}')
    (tmp_path / "README.md").write_text("not part of the corpus")
    assert read(tmp_path) == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:4", "😀"),
        ("b/two.txt", "zwei\r\n\ufeff"),
        ("c.jsonl.gz:1", "four"),
    ]
    assert read(tmp_path / "a.jsonl") == [("a.jsonl:1", "one"), ("a.jsonl:4", "😀")]


def test_byte_order_mark_before_json_is_taken(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    assert read(tmp_path / "a.jsonl") == [("a.jsonl:1", "one")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "cut', "line 2: not JSON"),
        (b'{"text": "\xff"}', "line 2: not JSON in UTF-8"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'["text"]', "line 2: not a JSON object"),
        (b'{"body": "x", "id": 3}', "fields there: body, id"),
        (b'{"text": 7}', "line 2: field 'text' is int"),
        (b'{"text": null}', "line 2: field 'text' is NoneType"),
        (b'{"text": "a\\ud800"}', "a.jsonl:2: character 1 is half of a surrogate pair"),
    ],
)
def test_bad_line_is_named(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    message = refusal(tmp_path / "a.jsonl")
    assert "a.jsonl" in message
    assert problem in message


def test_text_field_names_the_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    assert read(tmp_path / "a.jsonl", text_field="body") == [("a.jsonl:1", "x")]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "latin.txt: byte 3 is not UTF-8" in refusal(tmp_path)
    whole = gzip.compress(b'{"text": "one"}\n' * 100)
    for name, data in {"cut.jsonl.gz": whole[:-12], "plain.jsonl.gz": b'{"text": "one"}'}.items():
        (tmp_path / name).write_bytes(data)
        assert f"{name}: cannot be read" in refusal(tmp_path / name)


def test_missing_empty_and_unknown_sources(tmp_path):
    assert "embeded: no such file or folder; it takes embedded" in refusal("embeded")
    assert "no .txt, .jsonl or .jsonl.gz file" in refusal(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert "holds no text" in refusal(tmp_path)
    (tmp_path / "table.csv").write_text("a,b")
    assert "table.csv: not a .txt" in refusal(tmp_path / "table.csv")


def test_fingerprint_follows_names_sizes_times_and_field(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    prints = [fingerprint(corpus(tmp_path))]
    assert fingerprint(corpus(tmp_path)) == prints[0]
    file.write_text("three")
    prints.append(fingerprint(corpus(tmp_path)))
    os.utime(file, ns=(1, 1))
    prints.append(fingerprint(corpus(tmp_path)))
    prints.append(fingerprint(corpus(tmp_path, text_field="body")))
    file.rename(tmp_path / "b.txt")
    prints.append(fingerprint(corpus(tmp_path)))
    assert len(set(prints)) == 5


def test_heldout_share_is_met_and_growing_it_keeps_documents_held_out():
    names = [f"corpus.jsonl:{number}" for number in range(20_000)]
    small = {name for name in names if is_heldout(name, 0.05)}
    assert 0.045 < len(small) / len(names) < 0.055
    assert small < {name for name in names if is_heldout(name, 0.1)}
    assert not any(is_heldout(name, 0.0) for name in names)
    assert is_heldout("topics/assert", 0.05) is is_heldout("topics/assert", 0.05)


@pytest.fixture
def parquet_folder(tmp_path, monkeypatch) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    parquet.write_table(pyarrow.table({"text": ["one", "", "drei"], "n": [1, 2, 3]}), tmp_path / "rows.parquet")
    return tmp_path


def test_hub_dataset_is_read_by_row(parquet_folder):
    source = f"hub:{parquet_folder}"
    assert read(source) == [(f"{parquet_folder}:0", "one"), (f"{parquet_folder}:2", "drei")]
    assert "row 0: no field 'body'; set corpus.text_field to one of the fields there: text, n" in refusal(
        source, text_field="body"
    )
    assert "row 0: field 'n' is int" in refusal(source, text_field="n")
    assert "cannot be loaded" in refusal(f"hub:{parquet_folder}/nowhere")
    before = fingerprint(corpus(source))
    assert before == fingerprint(corpus(source))
    os.utime(parquet_folder / "rows.parquet", (1, 1))
    assert before != fingerprint(corpus(source))


def test_names_in_a_large_jsonl_are_line_numbers(tmp_path):
    rows = [json.dumps({"text": f"row {number}"}) for number in range(1, 2001)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert all(name == f"rows.jsonl:{text.split()[1]}" for name, text in read(tmp_path / "rows.jsonl"))
