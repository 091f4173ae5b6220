"""Files of test sets: given files, and files made from the rows of the real datasets library."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_data import SHARED, needs_shared

from tost_lm.errors import ConfigError, DataError
from tost_lm.tasks import missing_word, perplexity
from tost_lm.tasks.data_sets import DATA_SETS, SetFile
from tost_lm.tasks.registry import FAMILIES  # noqa: F401, declares the test sets

EVAL = SHARED / "eval"

ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext2": [{"text": text} for text in ("", " = Title = \n", "", " A text . \n")],
    "lambada_openai": [{"text": "Some words, a\u2028line and the end"}, {"text": "other words"}],
    "ptb": [{"sentence": "no it was n't"}, {"sentence": "N dogs"}],
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
        hub = DATA_SETS[name].hub
        assert hub
        (folder / f"{hub.split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        local = hub._replace(name=str(folder), subset=None, revision=None)
        monkeypatch.setitem(DATA_SETS, name, DATA_SETS[name])  # to be restored: `replace` registers its result
        replace(DATA_SETS[name], hub=local)


def find_file(name: str, file: Path | None = None) -> SetFile:
    return DATA_SETS[name].find_file({name: file} if file else {})


@pytest.mark.usefixtures("hub")
def test_rows_of_the_hub_become_files_in_the_published_format(capsys: pytest.CaptureFixture[str]):
    wiki = find_file("wikitext2").path
    assert wiki.read_text() == " \n = Title = \n \n A text . \n"
    assert perplexity.wikitext_rows(wiki) == [row["text"] for row in ROWS["wikitext2"]]
    passages = find_file("lambada_openai").path
    assert missing_word.passages(passages) == [row["text"] for row in ROWS["lambada_openai"]]
    treebank = find_file("ptb").path
    assert perplexity.ptb_lines(treebank) == [f" {row['sentence']} " for row in ROWS["ptb"]]
    assert capsys.readouterr().out.count("downloading ") == 3


@pytest.mark.usefixtures("hub")
def test_a_missing_set_is_one_line_that_asks_for_a_file():
    with pytest.raises(
        ConfigError, match=r"^sets\.owt: not set, and .* give sets\.owt=FILE \(val\.bin of OpenWebText "
    ):
        find_file("owt")
    hub = DATA_SETS["ptb"].hub
    assert hub
    replace(DATA_SETS["ptb"], hub=hub._replace(name="/nowhere/at/all"))  # registers its result
    with pytest.raises(
        ConfigError,
        match=r"^sets\.ptb: not set, and hub:/nowhere/at/all cannot .*; give sets\.ptb=FILE",
    ):
        find_file("ptb")
    assert not Path("data").exists()


def test_without_a_network_nothing_is_retried(tmp_path: Path):
    script = "from tost_lm.tasks.perplexity import PTB\nPTB.find_file({})\n"
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
    plain, packed = (find_file("ptb", tmp_path / name) for name in ("a.txt", "a.txt.gz"))
    assert plain.sha256 == packed.sha256
    assert plain.is_published is packed.is_published is None
    assert find_file("wikitext2", tmp_path / "a.txt").is_published is False
    assert find_file("owt", tmp_path / "a.txt").is_published is False  # its size is known
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "a.txt.gz").read_bytes()[:12] + b"\xff" * 9)
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read: .*; download it again"):
        find_file("ptb", tmp_path / "a.txt.gz")
    with pytest.raises(DataError, match=r"sets\.ptb .*nowhere: no such file; give Mikolov's ptb\.test\.txt"):
        find_file("ptb", tmp_path / "nowhere")


@needs_shared
def test_published_files_are_recognized():
    wiki, lambada_test = EVAL / "wiki.test.raw.gz", EVAL / "lambada_test.jsonl.gz"
    for name, file in {"wikitext2": wiki, "lambada_openai": lambada_test}.items():
        assert find_file(name, file).is_published
    with pytest.raises(DataError, match=r"jsonl\.gz: the published file of lambada_openai; give wiki\.test"):
        find_file("wikitext2", lambada_test)
    with pytest.raises(DataError, match=r"the published file of lambada_openai; give LAMBADA's original, lower-case"):
        find_file("lambada_standard", lambada_test)
    with pytest.raises(DataError, match=r"the published file of wikitext2; give val\.bin of OpenWebText "):
        find_file("owt", wiki)
