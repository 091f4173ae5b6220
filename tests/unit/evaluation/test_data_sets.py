"""Files of test sets: given ones, and those made of a dataset's rows by the real datasets library."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tost_lm.config import validate
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation import data_sets
from tost_lm.evaluation.data_sets import HUB_SETS, PUBLISHED_SHA256, find_set_file
from tost_lm.evaluation.protocols import cbt, lambada, ptb, wikitext
from tost_lm.evaluation.zero_shot_config import DataSetsConfig
from tost_lm.files import sha256_bytes

SHARED = Path(__file__).parents[4] / "shared/data/eval"

SENTENCES = [f"Sentence {number} , it said ." for number in range(1, 21)]
QUESTION = {
    "sentences": SENTENCES, "question": "Then XXXXX said no .", "answer": "dog", "options": ["dog", *"abcdefghi"],
}  # fmt: skip
ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext2": [{"text": text} for text in ("", " = Title = \n", "", " A text . \n")],
    "lambada_openai": [{"text": "Some words, a\u2028line and the end"}, {"text": "other words"}],
    "ptb": [{"sentence": "no it was n't"}, {"sentence": "N dogs"}],
    "cbt_cn": [QUESTION, QUESTION],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of JSON lines for each data set in place of the hub's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name, rows in ROWS.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        split = HUB_SETS[name].split
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        local = HUB_SETS[name]._replace(name=str(folder), subset=None, revision=None)
        monkeypatch.setitem(data_sets.HUB_SETS, name, local)


def given(**files: Path) -> DataSetsConfig:
    return validate(DataSetsConfig, {name: str(path) for name, path in files.items()}, "test")


@pytest.mark.usefixtures("hub")
def test_rows_of_the_hub_become_the_published_files(capsys: pytest.CaptureFixture[str]):
    wiki = find_set_file("wikitext2", given()).path
    assert wiki.read_text() == " \n = Title = \n \n A text . \n"
    assert wikitext.rows_of(wiki) == [row["text"] for row in ROWS["wikitext2"]]
    passages = find_set_file("lambada_openai", given()).path
    assert lambada.passages(passages) == [row["text"] for row in ROWS["lambada_openai"]]
    treebank = find_set_file("ptb", given()).path
    assert ptb.sentences(treebank) == [row["sentence"] for row in ROWS["ptb"]]
    first, second = cbt.questions(find_set_file("cbt_cn", given()).path)
    assert first == second
    assert first.before.startswith("Sentence 1 , it said . Sentence 2")
    assert (first.after, first.answer, first.candidates) == ("said no .", "dog", ("dog", *"abcdefghi"))
    assert capsys.readouterr().out.count("fetching ") == 4


@pytest.mark.usefixtures("hub")
def test_what_was_fetched_is_not_fetched_again(capsys: pytest.CaptureFixture[str]):
    fetched = find_set_file("ptb", given())
    assert fetched.source == f"hub:{HUB_SETS['ptb'].name}"
    capsys.readouterr()
    assert find_set_file("ptb", given()) == fetched
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("hub")
def test_a_fetched_file_that_is_not_the_published_one_is_said_to_be_another():
    assert find_set_file("wikitext2", given()).source == "other"


@pytest.mark.usefixtures("hub")
def test_a_set_that_cannot_be_had_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"^enwik8 needs a file: give sets\.enwik8=FILE \(enwik8 as it is"):
        find_set_file("enwik8", given())
    monkeypatch.setitem(data_sets.HUB_SETS, "ptb", HUB_SETS["ptb"]._replace(name="/nowhere/at/all"))
    with pytest.raises(ConfigError, match=r"^ptb needs a file: .*; hub:/nowhere/at/all cannot be had: "):
        find_set_file("ptb", given())
    assert not Path("data").exists()


def test_a_given_file_is_taken_packed_or_not(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    plain, packed = (find_set_file("ptb", given(ptb=tmp_path / name)) for name in ("a.txt", "a.txt.gz"))
    assert plain.sha256 == packed.sha256
    assert plain.source == packed.source == "unverified"
    assert find_set_file("wikitext2", given(wikitext2=tmp_path / "a.txt")).source == "other"
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "a.txt.gz").read_bytes()[:12] + b"\xff" * 9)
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read: "):
        find_set_file("ptb", given(ptb=tmp_path / "a.txt.gz"))
    with pytest.raises(DataError, match=r"sets\.ptb .*nowhere: no such file"):
        find_set_file("ptb", given(ptb=tmp_path / "nowhere"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the test sets are not at hand")
def test_the_rows_of_the_hub_give_the_published_bytes():
    rows = [{"text": row} for row in wikitext.rows_of(SHARED / "wiki.test.raw.gz")]
    texts = {"wikitext2": "".join(HUB_SETS["wikitext2"].to_text(rows))}
    rows = [{"text": text} for text in lambada.passages(SHARED / "lambada_test.jsonl.gz")]
    texts["lambada_openai"] = "".join(HUB_SETS["lambada_openai"].to_text(rows))
    for name, text in texts.items():
        assert sha256_bytes(text.encode()) == PUBLISHED_SHA256[name]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the test sets are not at hand")
def test_the_published_files_are_known():
    files = {
        "wikitext2": "wiki.test.raw.gz",
        "wikitext103": "wiki.test.raw.gz",
        "lambada_openai": "lambada_test.jsonl.gz",
    }
    for name, file in files.items():
        assert find_set_file(name, given(**{name: SHARED / file})).source == "published"
