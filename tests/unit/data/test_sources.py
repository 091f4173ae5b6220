"""A corpus is found, counted, identified and turned into documents; what cannot be used is said in one line."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest

from tost_lm.config import validate
from tost_lm.data.build import build_shards
from tost_lm.data.config import CorpusConfig, DataPrepConfig
from tost_lm.data.sources import BadRow, Document, Position, count_rows, fingerprint, parse, read_blocks
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.record import write_tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import DataError


def corpus(source: Path | str, **settings) -> CorpusConfig:
    return CorpusConfig.model_validate({"source": str(source), **settings})


def read(source: Path | str, **settings) -> list[Document | BadRow]:
    config = corpus(source, **settings)
    return [row for block in read_blocks(config) for row in parse(block, config)]


def texts(source: Path | str, **settings) -> list[str]:
    rows = read(source, **settings)
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row.text for row in rows if isinstance(row, Document)]


def refusal(source: Path | str, **settings) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, **files: str) -> Path:
    """Files of one JSON row or text each; in names, __ stands for / and the last _ for the dot of the ending."""
    for name, text in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": text}) if path.suffix == ".jsonl" else text)
    return folder


def test_embedded_is_large_and_the_same_every_time():
    found = texts("embedded")
    assert len(found) > 400
    assert sum(len(text.encode()) for text in found) > 5_000_000
    assert any("class JSONDecoder" in text for text in found)
    assert found == texts("embedded", text_field="body")
    assert count_rows(corpus("embedded")) >= len(found)
    assert fingerprint(corpus("embedded")) == fingerprint(corpus("embedded"))


def test_folder_is_read_in_order_of_names_without_what_is_hidden_or_unknown(tmp_path):
    write(tmp_path, b__two_txt="three", c_jsonl="four", a_jsonl="one", b__ONE_TXT="two")
    write(tmp_path, **{"README_md": "no", "b__x_csv": "no", ".hidden_txt": "no", ".cache__copy_txt": "no"})
    assert texts(tmp_path) == ["one", "two", "three", "four"]
    assert texts(f"{tmp_path}/") == texts(tmp_path)
    assert texts(tmp_path / "a.jsonl") == ["one"]
    hidden = tmp_path / ".corpus"
    hidden.mkdir()
    assert texts(write(hidden, a_txt="a hidden folder may be named")) == ["a hidden folder may be named"]


def test_glob_takes_what_it_matches_in_order_of_names(tmp_path):
    write(tmp_path, b__2_jsonl="b2", a__1_jsonl="a1", a__deep__3_jsonl="a3", b__2_txt="text", b__table_csv="x")
    assert texts(f"{tmp_path}/*/*.jsonl") == ["a1", "b2"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a1", "a3", "b2"]
    assert texts(f"{tmp_path}/[b]/?.*") == ["b2", "text"]
    assert "b/table.csv cannot be read; a corpus takes .txt, .jsonl" in refusal(f"{tmp_path}/b/*")
    assert "no file matches" in refusal(f"{tmp_path}/*.parquet")
    assert "it matches folders" in refusal(f"{tmp_path}/[ab]")
    write(tmp_path, **{"odd[1]_txt": "a name with signs of a glob"})
    assert texts(tmp_path / "odd[1].txt") == ["a name with signs of a glob"]


def test_linked_folders_are_followed_and_loops_refused(tmp_path):
    write(tmp_path, data__a_txt="one", elsewhere__b_txt="two")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    assert texts(tmp_path / "data") == ["one", "two"]
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    assert "links back to a folder" in refusal(tmp_path / "data")


def test_what_datasets_saves_beside_its_rows_is_no_part_of_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    (tmp_path / "saved/train/cache-0123.arrow").write_bytes(b"made by map")
    assert {"state.json", "dataset_info.json"} <= {path.name for path in (tmp_path / "saved/train").iterdir()}
    assert texts(tmp_path / "saved") == ["one", "two", "three"]
    write(tmp_path, states__state_json='{"text": "of affairs"}')
    assert texts(tmp_path / "states") == ["of affairs"]


def test_what_is_made_of_a_corpus_may_lie_in_it(tmp_path):
    rows = [json.dumps({"text": f"row {number}, the file has more of them {number * 7919}"}) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "bad"]))
    write(tmp_path, web__manifest_json='{"text": "of a ship"}', web__card_model_json='{"text": "of a car"}')
    sources = [tmp_path, f"{tmp_path}/**/*.json*", f"{tmp_path}/[abtw]*/**", f"{tmp_path}/**"]
    before = [(fingerprint(corpus(source)), list(read_blocks(corpus(source)))) for source in sources]
    tree = {
        "corpus": {"source": str(tmp_path), "valid_share": 0.2, "max_bad_share": 0.1},
        "tokenizer": {"path": str(tmp_path / "tokens/own.model"), "vocab_size": 300},
        "shards": {"folder": str(tmp_path / "shards"), "workers": 1},
    }
    config = validate(DataPrepConfig, tree, "test")
    model = train_sentencepiece(rows, 300)
    write_tokenizer(config, fingerprint(config.corpus), model, 30, 1000)
    build_shards(config, SentencePieceTokenizer(model))
    made = {path.name for path in tmp_path.rglob("*")}
    assert {"own.model", "own.model.json", "bad_rows.jsonl", "tokenizer.model", "train_00000.bin"} <= made
    for source, (found, blocks) in zip(sources, before, strict=True):
        assert fingerprint(corpus(source)) == found
        assert list(read_blocks(corpus(source))) == blocks
    assert "no file in this folder ends in" in refusal(tmp_path / "shards")
    assert refusal(f"{tmp_path}/shards/*").endswith("no file matches")


def test_missing_empty_and_unknown_sources(tmp_path):
    assert "embeded: no such file or folder; it takes embedded, a file, a folder, a glob or hub:NAME" in refusal(
        "embeded"
    )
    assert "no file in this folder ends in .txt, .jsonl" in refusal(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    assert "holds no rows" in refusal(tmp_path)
    (tmp_path / "table.csv").write_text("a,b")
    assert "table.csv cannot be read; a corpus takes" in refusal(tmp_path / "table.csv")
    (tmp_path / "table.parquet.gz").write_text("a,b")
    assert "table.parquet.gz cannot be read; a corpus takes" in refusal(tmp_path / "table.parquet.gz")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert "gone.txt: No such file" in refusal(tmp_path)
    for call in (count_rows, fingerprint):
        with pytest.raises(DataError, match="no such file or folder"):
            call(corpus(tmp_path / "nowhere"))


def test_fingerprint_follows_files_and_settings_that_decide_documents(tmp_path):
    file = write(tmp_path, data__a_txt="one") / "data/a.txt"
    folder = file.parent

    def of_folder(**settings) -> str:
        return fingerprint(corpus(folder, **settings))

    prints = [of_folder()]
    for name, value in {
        "text_field": "body", "text_documents": "line", "normalization": "NFC", "min_characters": 2,
        "max_characters": 9, "hub_subset": "en", "hub_revision": "main", "hub_split": "test",
    }.items():  # fmt: skip
        prints.append(of_folder(**{name: value}))
    same = {"split": "nanogpt", "valid_share": 0.2, "test_share": 0.1, "max_bad_share": 0.5, "hub_streaming": False}
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


def test_blocks_are_numbered_from_end_to_end(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{n}"}}\n\n' for n in range(50)))
    write(tmp_path, bb_txt="a text")
    blocks = list(read_blocks(corpus(tmp_path), block_bytes=100))
    assert [block.first_row for block in blocks] == [0, *(block.end.row for block in blocks[:-1])]
    assert blocks[-1].end.row == sum(block.rows for block in blocks) == count_rows(corpus(tmp_path)) == 151
    shares = [block.share_read or 0 for block in blocks]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1
    rows = [row for block in blocks for row in parse(block, corpus(tmp_path))]
    assert [row.row for row in rows] == list(range(151))
    for block in blocks:
        assert pickle.loads(pickle.dumps(block)) == block
        assert Position(*json.loads(json.dumps(block.end))) == block.end


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string starting at at character 9"),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b'["text"]', "not a JSON object but an array"),
        (b"null", "not a JSON object but null"),
        (b'{"body": "x", "id": 3}', "no field 'text'; set corpus.text_field to one of the fields there: body, id"),
        (b"{}", "fields there: none"),
        (b'{"text": 7}', "field 'text' is a number, not a string"),
        (b'{"text": ["a"]}', "field 'text' is an array, not a string"),
        (b'{"text": true}', "field 'text' is a boolean, not a string"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": "a\\ud800"}', "character 1 of field 'text' is half of a surrogate pair"),
    ],
)
def test_bad_line_is_named_and_the_rest_is_read(tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine too"}')
    first, bad, last = read(file)
    assert (first, last) == (Document(0, "fine"), Document(2, "fine too"))
    assert isinstance(bad, BadRow)
    assert (bad.row, bad.where) == (1, f"{file}, line 3")
    assert reason in bad.reason
    assert "\n" not in bad.reason


@pytest.mark.parametrize("names", [["a\nb\u2028\ud800é\x1b[0m"], ["x" * 10_000], [f"field {n}" for n in range(5000)]])
def test_fields_are_listed_on_a_short_line(tmp_path, names):
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(names, 1)))
    (bad,) = read(tmp_path)
    assert isinstance(bad, BadRow)
    assert bad.reason.isprintable()
    assert len(bad.reason.encode()) < 300
    shown = r"there: (a\\nb\\u2028\\ud800é\\x1b\[0m|x{200} …|field 0, .*, field 7 …)$"
    assert re.search(shown, bad.reason)


def test_names_of_files_that_are_not_utf8_are_escaped(tmp_path):
    file = tmp_path / os.fsdecode(b"caf\xe9\n.txt")
    file.write_bytes(b"\xff")
    assert read(tmp_path) == [BadRow(0, f"{tmp_path}/caf\\udce9\\n.txt", "byte 0 is not UTF-8")]


def test_a_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\nfine\n")
    write(tmp_path, z_txt="the next file")
    assert read(tmp_path) == [
        BadRow(0, f"{tmp_path}/latin.txt", "byte 8 is not UTF-8"),
        Document(1, "the next file"),
    ]
    assert read(tmp_path / "latin.txt", text_documents="line") == [
        Document(0, "fine"),
        BadRow(1, f"{tmp_path}/latin.txt, line 2", "byte 3 is not UTF-8"),
        Document(2, "fine"),
    ]


def test_text_field_names_the_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}')
    assert texts(tmp_path / "a.jsonl", text_field="body") == ["x"]


def test_texts_are_normalised_and_then_measured_in_characters(tmp_path):
    words = ["", "e\u0301", "ﬁ", "abc", "😀😀"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))
    assert read(tmp_path) == [Document(row, word) for row, word in enumerate(words) if row]
    assert texts(tmp_path, normalization="NFC") == ["é", "ﬁ", "abc", "😀😀"]
    assert texts(tmp_path, normalization="NFKC") == ["é", "fi", "abc", "😀😀"]
    assert texts(tmp_path, normalization="NFC", min_characters=2) == ["abc", "😀😀"]
    assert texts(tmp_path, normalization="NFC", min_characters=2, max_characters=2) == ["😀😀"]
    assert texts(tmp_path, max_characters=1) == ["ﬁ"]


def test_a_corpus_is_only_read(tmp_path):
    write(tmp_path, a_jsonl="one", b_txt="two")
    tmp_path.chmod(0o555)
    try:
        before = {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
        assert texts(tmp_path) == ["one", "two"]
        assert count_rows(corpus(tmp_path)) == 2
        fingerprint(corpus(tmp_path))
        assert {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before
    finally:
        tmp_path.chmod(0o755)


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A folder of Parquet files with two subsets, of which one says how many rows it has."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    for subset, split, words in [
        ("en", "train", ["one", "", "three", None, *map(str, range(600))]),
        ("en", "validation", ["held out"]),
        ("de", "train", ["eins"]),
    ]:
        folder = tmp_path / "data" / subset
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(
            pyarrow.table({"text": words, "n": list(range(len(words)))}),
            folder / f"{split}.parquet",
            row_group_size=100,
        )
    (tmp_path / "data/README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  default: true\n  data_files:\n"
        "  - split: train\n    path: en/train.parquet\n  - split: validation\n    path: en/validation.parquet\n"
        "- config_name: de\n  data_files: de/*.parquet\n"
        "dataset_info:\n- config_name: de\n  features:\n  - name: text\n    dtype: string\n"
        "  - name: n\n    dtype: int64\n  splits:\n  - name: train\n    num_bytes: 10\n    num_examples: 1\n---\n"
    )
    return tmp_path / "data"


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_dataset_is_read_by_subset_and_split(hub_folder, streaming):
    source, mode = f"hub:{hub_folder}", {"hub_streaming": streaming}
    rows = read(source, **mode)
    assert rows[:4] == [
        Document(0, "one"),
        Document(2, "three"),
        BadRow(3, f"{source}, row 3", "field 'text' is null"),
        Document(4, "0"),
    ]
    assert [row.row for row in rows] == [row for row in range(604) if row != 1]
    assert count_rows(corpus(source, **mode)) == 604
    assert texts(source, hub_split="validation", **mode) == ["held out"]
    assert texts(source, hub_subset="de", **mode) == ["eins"]
    for settings, problem in [
        ({"text_field": "body"}, "no column 'body'; set corpus.text_field to one of those there: text, n"),
        ({"text_field": "n"}, "column 'n' is int64, not string"),
        ({"hub_split": "nope"}, "cannot be loaded"),
        ({"hub_subset": "nope"}, "cannot be loaded"),
    ]:
        assert problem in refusal(source, **mode, **settings)
    assert "cannot be loaded" in refusal(f"{source}/nowhere", **mode)


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_dataset_goes_on_from_every_block(hub_folder, streaming):
    config = corpus(f"hub:{hub_folder}", hub_streaming=streaming)
    blocks = list(read_blocks(config, block_bytes=2000))
    assert len(blocks) > 4
    for number, block in enumerate(blocks, start=1):
        assert list(read_blocks(config, block.end, block_bytes=2000)) == blocks[number:]


def test_hub_dataset_is_identified_and_counted_by_what_it_says(hub_folder):
    config = corpus(f"hub:{hub_folder}", hub_subset="de")
    assert [block.share_read for block in read_blocks(config)] == [1.0]
    assert count_rows(config) == 1
    unknown = corpus(f"hub:{hub_folder}")
    assert {block.share_read for block in read_blocks(unknown)} == {None}
    downloaded = corpus(f"hub:{hub_folder}", hub_streaming=False)
    assert [block.share_read for block in read_blocks(downloaded)] == [1.0]
    assert fingerprint(downloaded) == fingerprint(unknown)
    before = fingerprint(unknown)
    assert before == fingerprint(unknown) != fingerprint(config)
    os.utime(hub_folder / "en/train.parquet", (1, 1))
    assert before != fingerprint(unknown)


def test_hub_dataset_of_a_loading_script_names_the_way_out(hub_folder):
    script = hub_folder.parent / "scripted"
    script.mkdir()
    (script / "scripted.py").write_text("import datasets\n")
    assert "corpus.hub_revision=refs/convert/parquet" in refusal(f"hub:{script}")
