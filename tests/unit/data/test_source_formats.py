"""Every format gives the same rows, in blocks at whose ends reading can resume."""

import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from builds import corpus, read, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources import BadRow, Document, count_rows, lines, parse, read_blocks, tables
from tost_lm.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [
    "one",
    "zwei\r\n\u2028\u2029\x85drei",
    "",
    "😀 \ufeff",
    '"\\',
    "x" * 700,
    *(f"row {n} " * (n % 7) for n in range(80)),
]


def json_lines(texts: list[str]) -> bytes:
    """Rows with unescaped Unicode line separators, which do not end a line."""
    return "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def zstandard(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def table(texts: Sequence[str | None], kind=None):
    return pyarrow.table({"id": list(range(len(texts))), "text": pyarrow.array(texts, kind)})


def as_parquet(data) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(data, sink, row_group_size=7)
    return sink.getvalue()


DICTIONARY = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "rows.jsonl": json_lines,
    "rows.jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    "members.jsonl.gz": lambda texts: b"".join(gzip.compress(json_lines([text])) for text in texts),
    "rows.jsonl.zst": lambda texts: zstandard(json_lines(texts)),
    "frames.jsonl.zst": lambda texts: b"".join(zstandard(json_lines([text])) for text in texts),
    "lines.json": json_lines,
    "rows.parquet": lambda texts: as_parquet(table(texts)),
    "large.parquet": lambda texts: as_parquet(table(texts, pyarrow.large_string())),
    "dictionary.parquet": lambda texts: as_parquet(table(texts, DICTIONARY)),
    "view.parquet": lambda texts: as_parquet(table(texts, pyarrow.string_view())),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_and_resumes_at_every_block(tmp_path, name):
    (tmp_path / name).write_bytes(FORMATS[name](TEXTS))
    (tmp_path / "z.txt").write_text("the next file")
    config = corpus(tmp_path)
    expected = [Document(row, text) for row, text in enumerate([*TEXTS, "the next file"]) if text]
    assert read(config) == expected
    assert count_rows(config) == len(TEXTS) + 1
    for block_bytes in (1, 200, 333, 5000):
        blocks = list(read_blocks(config, block_bytes=block_bytes))
        assert [row for block in blocks for row in parse(block, config)] == expected
        assert [block.first_row for block in blocks] == [0, *(block.end.row for block in blocks[:-1])]
        for number, block in enumerate(blocks, start=1):
            rest = list(read_blocks(config, block.end, block_bytes=block_bytes))
            assert rest == blocks[number:]
        fractions = [block.fraction_read or 0 for block in blocks]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1


LINES = st.lists(
    st.one_of(
        st.text(max_size=30).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
        st.sampled_from([b"", b" \t", b"\r", b"{", b"7", b'{"text": "\xff"}', b'{"text": 1}', b'{"body": ""}']),
    )
)


@pytest.mark.quick
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    LINES.filter(lambda rows: any(map(bytes.strip, rows))),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 200),
)
def test_lines_are_rows_for_any_block_size(tmp_path, rows, newline, ended, block_bytes):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(newline.join(rows) + newline * ended)
    config = corpus(file)
    expected = []
    for number, line in enumerate(rows, start=1):
        if line.strip():
            row = len(expected)
            try:
                expected.append(Document(row, str(json.loads(line.decode())["text"] + "")))
            except (ValueError, KeyError, TypeError):
                expected.append((row, f"{file}, line {number}"))
    found = [row if isinstance(row, Document) else row[:2] for row in read(config, block_bytes)]
    assert found == [row for row in expected if not (isinstance(row, Document) and not row.text)]
    assert count_rows(config) == len(expected)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("pack", [lambda data: (data, ""), lambda data: (gzip.compress(data), ".gz")])
def test_a_byte_order_mark_is_skipped(tmp_path, name, pack):
    body = b"one\ntwo" if name == "a.txt" else json_lines(["one", "two"])
    data, ending = pack(b"\xef\xbb\xbf" + body)
    file = tmp_path / (name + ending)
    file.write_bytes(data)
    config = corpus(file, text_documents="line")
    assert read(config) == [Document(0, "one"), Document(1, "two")]
    first, second = read_blocks(config, block_bytes=22 if "json" in name else 4)
    assert list(read_blocks(config, first.end, block_bytes=22 if "json" in name else 4)) == [second]


@pytest.mark.parametrize("kind", [".txt", ".md"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document_or_one_a_line(tmp_path, kind, compression):
    data = "one\r\n\n  \ntwo\u2028zwei\n\nthree".encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard}[compression]
    for name, text in {"a": data, "b": b"", "c": b"last\n"}.items():
        (tmp_path / f"{name}{kind}{compression}").write_bytes(pack(text))
    assert read(corpus(tmp_path)) == [Document(0, data.decode()), Document(2, "last\n")]
    by_line = corpus(tmp_path, text_documents="line")
    expected = [Document(row, text) for row, text in enumerate(["one", "two\u2028zwei", "three", "last"])]
    for block_bytes in (1, 8, 1000):
        assert read(by_line, block_bytes) == expected
        for config in (corpus(tmp_path), by_line):
            blocks = list(read_blocks(config, block_bytes=block_bytes))
            for number, block in enumerate(blocks, start=1):
                assert list(read_blocks(config, block.end, block_bytes=block_bytes)) == blocks[number:]


def test_too_long_documents_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "ROW_LIMIT", 1000)
    monkeypatch.setattr(tables, "ROW_LIMIT", 1000)
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert len(read(corpus(tmp_path))) == 1
    (tmp_path / "a.txt").write_text("x\n" * 501)
    assert "a.txt: a document of more than" in refusal(corpus(tmp_path))
    assert "corpus.text_documents=line" in refusal(corpus(tmp_path))
    assert len(read(corpus(tmp_path, text_documents="line"))) == 501
    (tmp_path / "a.jsonl").write_text("x" * 5000)
    with pytest.raises(DataError, match="a line is longer than"):
        list(read_blocks(corpus(tmp_path / "a.jsonl"), block_bytes=100))
    (tmp_path / "a.parquet").write_bytes(as_parquet(table(["x" * 1001])))
    assert "a text is longer than" in refusal(corpus(tmp_path / "a.parquet"))


@pytest.mark.quick
@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_named(tmp_path, name):
    whole = FORMATS[name](["".join(random.Random(n).choices("abcdefgh", k=2000)) for n in range(100)])
    file = tmp_path / name
    for cut in (len(whole) // 2 + 3, len(whole) - 5, 3):
        file.write_bytes(whole[:cut])
        config = corpus(file)
        if name in ("rows.jsonl", "lines.json"):
            *_, last = read(config)  # a truncated line is a bad row
            assert isinstance(last, BadRow)
            assert "not JSON" in last.reason
        else:
            assert f"{file}: cannot be read" in refusal(config)


def test_files_with_the_wrong_ending_are_named(tmp_path):
    for name in ("a.jsonl.gz", "a.txt.zst", "a.parquet"):
        file = tmp_path / name
        file.write_bytes(b'{"text": "plain"}\n' * 20)
        assert f"{file}: cannot be read: " in refusal(corpus(file))
    for name in ("a.jsonl.gz", "a.json.zst", "a.txt.gz", "a.txt.zst"):
        file = tmp_path / name
        file.write_bytes(b"")
        assert f"{file}: cannot be read: truncated to 0 bytes; correct, replace or remove" in refusal(corpus(file))
    damaged = bytearray(gzip.compress(json_lines(TEXTS)))
    damaged[-8] ^= 1
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damaged)
    assert f"{file}: cannot be read: " in refusal(corpus(file))
    with pytest.raises(DataError, match="cannot be read"):
        count_rows(corpus(file))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith(".parquet")])
def test_the_text_column_must_exist_and_hold_strings(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(FORMATS[name](["x"]))
    for column, problem in {
        "body": "no column 'body'; set corpus.text_field to a column of the table: id, text",
        "id": "column 'id' is int64; set corpus.text_field to a string column",
    }.items():
        assert f"{file}: {problem}" in refusal(corpus(file, text_field=column))


def test_a_parquet_dictionary_of_one_long_text_needs_little_memory(tmp_path):
    """A file of 40 kB has 800 MB of text."""
    file, text = tmp_path / "a.parquet", "a" * 800_000
    parquet.write_table(pyarrow.table({"text": [text] * 1000}), file)
    assert file.stat().st_size < 40_000
    parent = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(parent)
    pyarrow.set_memory_pool(pool)
    try:
        assert sum(block.rows for block in read_blocks(corpus(file))) == 1000
    finally:
        pyarrow.set_memory_pool(parent)
    assert 10 * len(text) < pool.max_memory() < 80 * len(text)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), DICTIONARY])
def test_null_in_a_table_is_a_bad_row(tmp_path, kind):
    file = tmp_path / "a.parquet"
    file.write_bytes(as_parquet(table(["one", None, "three"] * 10, kind)))
    rows = read(corpus(file), block_bytes=40)
    assert rows[:3] == [Document(0, "one"), BadRow(1, f"{file}, row 1", "field 'text' is null"), Document(2, "three")]
    assert len(rows) == 30
    assert rows[-2] == BadRow(28, f"{file}, row 28", "field 'text' is null")


@pytest.mark.parametrize(("binary", "kind"), [("binary", "string"), ("large_binary", "large_string")])
def test_invalid_utf8_in_a_table_is_a_bad_row(tmp_path, binary, kind):
    raw = pyarrow.array([b"one", b"caf\xe9", None, b"last"], getattr(pyarrow, binary)())
    column = raw.view(getattr(pyarrow, kind)())
    file = tmp_path / "a.parquet"
    file.write_bytes(as_parquet(pyarrow.table({"text": column})))
    assert read(corpus(file)) == [
        Document(0, "one"),
        BadRow(1, f"{file}, row 1", "byte 3 is not UTF-8 (convert the text, for example with iconv)"),
        BadRow(2, f"{file}, row 2", "field 'text' is null"),
        Document(3, "last"),
    ]


def peak_bytes(config: CorpusConfig) -> int:
    """Peak memory of Python and Arrow while blocks are read and dropped."""
    list(read_blocks(config))  # imports
    pool, before = pyarrow.default_memory_pool(), pyarrow.total_allocated_bytes()
    highest = 0
    tracemalloc.start()
    for _ in read_blocks(config):
        highest = max(highest, pool.bytes_allocated() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + highest


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "one_group.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    texts = [f"{n:09} " * 500 for n in range(8000)]  # 40 MB
    if name == "one_group.parquet":
        parquet.write_table(table(texts), tmp_path / name, compression="none", use_dictionary=False)
    else:
        (tmp_path / name).write_bytes(FORMATS[name](texts))
    assert (tmp_path / name).stat().st_size > 30_000_000 or name.endswith(".gz")
    assert peak_bytes(corpus(tmp_path / name)) < 15_000_000
