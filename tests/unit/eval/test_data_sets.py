"""Files of test sets: given files, and files made from the rows of the real datasets library."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shared_data import SHARED, needs_shared

from tost_lm.config import validate
from tost_lm.errors import ConfigError, DataError
from tost_lm.eval import data_sets
from tost_lm.eval.data_sets import HUB_SETS, PUBLISHED_SHA256, find_set_file
from tost_lm.eval.protocols import missing_word, perplexity
from tost_lm.eval.settings import DataSetsConfig
from tost_lm.files import sha256_bytes

EVAL = SHARED / "eval"

SENTENCES = [f"Sentence {number} , it said ." for number in range(1, 21)]
QUESTION = {
    "sentences": SENTENCES, "question": "Then XXXXX said no .", "answer": "dog", "options": ["dog", *"abcdefghi"],
}  # fmt: skip
ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext2": [{"text": text} for text in ("", " = Title = \n", "", " A text . \n")],
    "lambada_openai": [{"text": "Some words, a\u2028line and the end"}, {"text": "other words"}],
    "ptb": [{"sentence": "no it was n't"}, {"sentence": "N dogs"}],
    "cbt_cn": [QUESTION, QUESTION],
    "arc_easy": [
        {"id": "1", "question": "Which?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
    ],
    "piqa": [{"goal": "To do it", "sol1": "do", "sol2": "do not", "label": 0}] * 1838,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A local folder of JSON lines instead of each data set on the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
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
def test_rows_of_the_hub_become_files_in_the_published_format(capsys: pytest.CaptureFixture[str]):
    wiki = find_set_file("wikitext2", given()).path
    assert wiki.read_text() == " \n = Title = \n \n A text . \n"
    assert perplexity.wikitext_rows(wiki) == [row["text"] for row in ROWS["wikitext2"]]
    passages = find_set_file("lambada_openai", given()).path
    assert missing_word.passages(passages) == [row["text"] for row in ROWS["lambada_openai"]]
    treebank = find_set_file("ptb", given()).path
    assert perplexity.ptb_lines(treebank) == [f" {row['sentence']} " for row in ROWS["ptb"]]
    first, second = missing_word.questions(find_set_file("cbt_cn", given()).path)
    assert first == second
    assert first.before.startswith("Sentence 1 , it said . Sentence 2")
    assert (first.after, first.answer, first.candidates) == ("said no .", "dog", ("dog", *"abcdefghi"))
    assert capsys.readouterr().out.count("downloading ") == 4
    for name, is_published in (("arc_easy", False), ("piqa", None)):  # known by the number of lines
        downloaded = find_set_file(name, given())
        assert [json.loads(line) for line in downloaded.path.read_text().split("\n")[:-1]] == ROWS[name]
        assert downloaded.is_published is is_published


@pytest.mark.usefixtures("hub")
def test_a_downloaded_file_is_reused(capsys: pytest.CaptureFixture[str]):
    downloaded = find_set_file("ptb", given())
    assert downloaded.is_published is None
    capsys.readouterr()
    assert find_set_file("ptb", given()) == downloaded
    assert capsys.readouterr().out == ""
    assert find_set_file("wikitext2", given()).is_published is False


@pytest.mark.usefixtures("hub")
def test_a_missing_set_is_one_line_that_asks_for_a_file(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ConfigError, match=r"^sets\.enwik8: not set, and .* give sets\.enwik8=FILE \(enwik8, the whole file\)"
    ):
        find_set_file("enwik8", given())
    monkeypatch.setitem(data_sets.HUB_SETS, "ptb", HUB_SETS["ptb"]._replace(name="/nowhere/at/all"))
    with pytest.raises(
        ConfigError,
        match=r"^sets\.ptb: not set, and hub:/nowhere/at/all cannot .*; give sets\.ptb=FILE",
    ):
        find_set_file("ptb", given())
    assert not Path("data").exists()


def test_without_a_network_nothing_is_retried(tmp_path: Path):
    script = (
        "from tost_lm.eval.data_sets import find_set_file\n"
        "from tost_lm.eval.settings import DataSetsConfig\n"
        "find_set_file('ptb', DataSetsConfig())\n"
    )
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, **unreachable}, capture_output=True, text=True
    )
    assert done.stdout == "downloading ptb from hub:ptb-text-only/ptb_text_only\n"
    *_, line = done.stderr.splitlines()
    assert "ConfigError: sets.ptb: not set, and hub:ptb-text-only/ptb_text_only cannot be downloaded (" in line
    assert "Retrying" not in done.stderr
    assert "thrown while requesting" not in done.stderr


def test_a_file_may_be_compressed(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    plain, packed = (find_set_file("ptb", given(ptb=tmp_path / name)) for name in ("a.txt", "a.txt.gz"))
    assert plain.sha256 == packed.sha256
    assert plain.is_published is packed.is_published is None
    assert find_set_file("wikitext2", given(wikitext2=tmp_path / "a.txt")).is_published is False
    assert find_set_file("enwik8", given(enwik8=tmp_path / "a.txt")).is_published is False  # its size is known
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "a.txt.gz").read_bytes()[:12] + b"\xff" * 9)
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read: .*; download it again"):
        find_set_file("ptb", given(ptb=tmp_path / "a.txt.gz"))
    with pytest.raises(DataError, match=r"sets\.ptb .*nowhere: no such file; give Mikolov's ptb\.test\.txt"):
        find_set_file("ptb", given(ptb=tmp_path / "nowhere"))


@needs_shared
def test_rows_of_the_hub_give_the_published_bytes():
    rows = [{"text": row} for row in perplexity.wikitext_rows(EVAL / "wiki.test.raw.gz")]
    texts = {"wikitext2": "".join(HUB_SETS["wikitext2"].to_text(rows))}
    rows = [{"text": text} for text in missing_word.passages(EVAL / "lambada_test.jsonl.gz")]
    texts["lambada_openai"] = "".join(HUB_SETS["lambada_openai"].to_text(rows))
    for name, text in texts.items():
        assert sha256_bytes(text.encode()) == PUBLISHED_SHA256[name]


@needs_shared
def test_published_files_are_recognized():
    wiki, lambada_test = EVAL / "wiki.test.raw.gz", EVAL / "lambada_test.jsonl.gz"
    for name, file in {"wikitext2": wiki, "wikitext103": wiki, "lambada_openai": lambada_test}.items():
        assert find_set_file(name, given(**{name: file})).is_published
    with pytest.raises(DataError, match=r"jsonl\.gz: the published file of lambada_openai; give wiki\.test"):
        find_set_file("wikitext2", given(wikitext2=lambada_test))
    with pytest.raises(DataError, match=r"the published file of lambada_openai; give LAMBADA's original, lower-case"):
        find_set_file("lambada_standard", given(lambada_standard=lambada_test))
    with pytest.raises(DataError, match=r"the published file of wikitext2; give enwik8, the whole file$"):
        find_set_file("enwik8", given(enwik8=wiki))
