"""A corpus is found, counted, fingerprinted and parsed; unusable input gives a one-line error."""

import json
import os
from pathlib import Path

import pytest
from builds import corpus, read, refusal

from tost_lm.data.sources import BadRow, Document, count_rows, fingerprint, left_out_files
from tost_lm.data.sources.files import corpus_files
from tost_lm.errors import DataError


def texts(source: Path | str, **settings) -> list[str]:
    rows = read(source, **settings)
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row.text for row in rows if isinstance(row, Document)]


def write(folder: Path, **files: str) -> Path:
    """Files of one JSON row or one text each; in names, __ means / and the last _ is the dot of the ending."""
    for name, text in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": text}) if path.suffix == ".jsonl" else text)
    return folder


def test_the_embedded_corpus_is_large_and_deterministic():
    found = texts("embedded")
    assert len(found) > 400
    assert sum(len(text.encode()) for text in found) > 5_000_000
    assert any("class JSONDecoder" in text for text in found)
    assert found == texts("embedded", text_field="body")
    assert count_rows(corpus("embedded")) >= len(found)
    assert fingerprint(corpus("embedded")) == fingerprint(corpus("embedded"))


def test_a_folder_is_read_in_order_of_names_without_hidden_files(tmp_path):
    write(tmp_path, b__two_txt="three", c_jsonl="four", a_jsonl="one", b__ONE_TXT="two")
    write(tmp_path, **{"README_md": "zero", "b__x_csv": "no", ".hidden_txt": "no", ".cache__copy_txt": "no"})
    assert texts(tmp_path) == ["zero", "one", "two", "three", "four"]
    assert texts(f"{tmp_path}/") == texts(tmp_path)
    assert texts(tmp_path / "a.jsonl") == ["one"]
    hidden = tmp_path / ".corpus"
    hidden.mkdir()
    assert texts(write(hidden, a_txt="a hidden folder may be named")) == ["a hidden folder may be named"]


def test_left_out_files_of_a_folder_are_counted_by_ending(tmp_path):
    write(tmp_path, a_txt="one", b_md="two", **{".hidden_pdf": "", "c__x_PDF": "", "c__y_pdf": "", "odd_\x1b": ""})
    for name in ("LICENSE", "Makefile", "table.csv.gz", "c/rows.parquet.zst", "c/z.pdf"):
        (tmp_path / name).touch()
    counts = "3 .pdf, 2 without ending, 1 .\\x1b, 1 .csv.gz, 1 .parquet.zst"
    assert left_out_files(str(tmp_path)) == f"left out 8 files: {counts}"
    assert texts(tmp_path) == ["one", "two"]
    assert left_out_files(str(tmp_path / "a.txt")) == left_out_files("embedded") == ""
    (tmp_path / "only").mkdir()
    (tmp_path / "only/scan.pdf").touch()
    assert "no supported file in this folder (left out 1 file: 1 .pdf); add" in refusal(tmp_path / "only")
    for number in range(20):
        (tmp_path / f"only/part.{number:03}").touch()
    assert left_out_files(str(tmp_path / "only")).endswith(", 1 .007 …")


def test_a_glob_reads_its_matches_in_order_of_names(tmp_path):
    write(tmp_path, b__2_jsonl="b2", a__1_jsonl="a1", a__deep__3_jsonl="a3", b__2_txt="text", b__table_csv="x")
    assert texts(f"{tmp_path}/*/*.jsonl") == ["a1", "b2"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a1", "a3", "b2"]
    assert texts(f"{tmp_path}/**/**/*.jsonl") == ["a1", "a3", "b2"]
    assert texts(f"{tmp_path}/[b]/?.*") == ["b2", "text"]
    assert "b/table.csv has no supported format; convert it to .txt, .md" in refusal(f"{tmp_path}/b/*")
    assert "no file matches" in refusal(f"{tmp_path}/*.parquet")
    assert f"no file matches, only folders; set it to {tmp_path}/[ab]/**" in refusal(f"{tmp_path}/[ab]")
    write(tmp_path, **{"odd[1]_txt": "a name with signs of a glob"})
    assert texts(tmp_path / "odd[1].txt") == ["a name with signs of a glob"]


def test_linked_folders_are_followed_and_loops_refused(tmp_path):
    write(tmp_path, data__a_txt="one", elsewhere__b_txt="two")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    assert texts(tmp_path / "data") == ["one", "two"]
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    assert "back: links to a folder that contains it; remove the link" in refusal(tmp_path / "data")


def test_missing_empty_and_unsupported_sources(tmp_path):
    assert "embeded: no such file or folder; set it to a file, a folder, a glob, hf://" in refusal("embeded")
    assert "no supported file in this folder; add files that end in .txt, .md, .jsonl" in refusal(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    assert "no rows; set it to files with documents" in refusal(tmp_path)
    (tmp_path / "table.csv").write_text("a,b")
    assert "table.csv has no supported format; convert it" in refusal(tmp_path / "table.csv")
    (tmp_path / "table.parquet.gz").write_text("a,b")
    assert "table.parquet.gz has no supported format; convert it" in refusal(tmp_path / "table.parquet.gz")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert "gone.txt: No such file" in refusal(tmp_path)
    for call in (count_rows, fingerprint):
        with pytest.raises(DataError, match="no such file or folder"):
            call(corpus(tmp_path / "nowhere"))


def test_a_pipe_in_a_corpus_is_refused_by_name(tmp_path):
    """Reading it would wait for ever."""
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.jsonl")
    for source in (tmp_path, tmp_path / "b.jsonl", tmp_path / "*"):
        with pytest.raises(DataError, match=r"b\.jsonl: must be a regular file, not a pipe or a device"):
            corpus_files(str(source))


def test_the_fingerprint_depends_on_files_and_document_settings(tmp_path):
    file = write(tmp_path, data__a_txt="one") / "data/a.txt"
    folder = file.parent

    def of_folder(**settings) -> str:
        return fingerprint(corpus(folder, **settings))

    prints = [of_folder()]
    for name, value in {
        "text_field": "body", "text_documents": "line", "normalization": "NFC", "min_characters": 2,
        "max_characters": 9,
    }.items():  # fmt: skip
        prints.append(of_folder(**{name: value}))
    same = {
        "split": "nanogpt",
        "valid_fraction": 0.2,
        "test_fraction": 0.1,
        "max_bad_fraction": 0.5,
    }
    assert of_folder(**same) == prints[0]
    file.write_text("three")
    prints.append(of_folder())
    os.utime(file, ns=(1, 1))
    prints.append(of_folder())
    file.rename(folder / "b.txt")
    prints.append(of_folder())
    assert len(set(prints)) == len(prints)
    moved = folder.rename(tmp_path / "elsewhere")
    assert fingerprint(corpus(moved)) == prints[-1]
    globbed = fingerprint(corpus(f"{moved}/*.txt"))
    assert globbed == fingerprint(corpus(f"{moved.rename(folder)}/*.txt"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string starting at at character 9"),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        (b"[" * 100_000, "JSON that cannot be read"),
        (b'{"n": ' + b"9" * 5000 + b"}", "JSON that cannot be read"),
        (b'["text"]', "not a JSON object but an array"),
        (b"null", "not a JSON object but null"),
        (b'{"body": "x", "id": 3}', "no field 'text'; set corpus.text_field to one of the fields there: body, id"),
        (b"{}", "fields there: none"),
        (b'{"text": 7}', "field 'text' is a number, not a string"),
        (b'{"text": ["a"]}', "field 'text' is an array, not a string"),
        (b'{"text": true}', "field 'text' is a boolean, not a string"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": "a\\ud800"}', "character 1 of field 'text' is a lone surrogate"),
    ],
)
def test_a_bad_line_is_named_and_the_rest_is_read(tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine too"}')
    first, bad, last = read(file)
    assert (first, last) == (Document(0, "fine"), Document(2, "fine too"))
    assert isinstance(bad, BadRow)
    assert (bad.row, bad.where) == (1, f"{file}, line 3")
    assert reason in bad.reason
    assert "\n" not in bad.reason


def not_utf8(byte: int) -> str:
    return f"byte {byte} is not UTF-8 (convert the text, for example with iconv)"


def test_file_names_that_are_not_utf8_are_escaped(tmp_path):
    file = tmp_path / os.fsdecode(b"caf\xe9\n.txt")
    file.write_bytes(b"\xff")
    assert read(tmp_path) == [BadRow(0, f"{tmp_path}/caf\\udce9\\n.txt", not_utf8(0))]


def test_a_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\nfine\n")
    write(tmp_path, z_txt="the next file")
    assert read(tmp_path) == [BadRow(0, f"{tmp_path}/latin.txt", not_utf8(8)), Document(1, "the next file")]
    assert read(tmp_path / "latin.txt", text_documents="line") == [
        Document(0, "fine"),
        BadRow(1, f"{tmp_path}/latin.txt, line 2", not_utf8(3)),
        Document(2, "fine"),
    ]


def test_texts_are_normalized_before_their_length_is_checked(tmp_path):
    words = ["", "e\u0301", "ﬁ", "abc", "😀😀"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))
    assert read(tmp_path) == [Document(row, word) for row, word in enumerate(words) if row]
    assert texts(tmp_path, normalization="NFC") == ["é", "ﬁ", "abc", "😀😀"]
    assert texts(tmp_path, normalization="NFKC") == ["é", "fi", "abc", "😀😀"]
    assert texts(tmp_path, normalization="NFC", min_characters=2) == ["abc", "😀😀"]
    assert texts(tmp_path, normalization="NFC", min_characters=2, max_characters=2) == ["😀😀"]
    assert texts(tmp_path, max_characters=1) == ["ﬁ"]
