"""The contamination of a run in its results and in its report."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tost_lm.config import validate
from tost_lm.data.shards import Shards
from tost_lm.errors import CheckpointError
from tost_lm.eval.commands.contamination import main
from tost_lm.eval.contamination import contamination
from tost_lm.eval.settings import ContaminationConfig
from tost_lm.inference.subject import write_result_file
from tost_lm.report.page import to_html
from tost_lm.report.record import RunRecord

MARKUP = "a|<b>_c_"
QUOTED = 5


@pytest.fixture
def mixture(run_folder: Path, shards: Shards, tmp_path: Path) -> list[Path]:
    """The run is trained on a mixture of two equal shard folders."""
    folders = [shards.folder, tmp_path / MARKUP]
    shutil.copytree(folders[0], folders[1])
    config = run_folder / "config.toml"
    weights = ", ".join(f"{json.dumps(str(folder))} = 1.0" for folder in folders)
    config.write_text(re.sub("(?m)^folder = .*$", f"mixture = {{ {weights} }}", config.read_text()))
    return folders


def search(run: Path, output: Path | None = None, **sets: list[str]) -> None:
    for name, texts in sets.items():
        (run / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = {
        "contamination": {"workers": 1, "output": output and str(output)},
        "sets": {name: str(run / f"{name}.jsonl") for name in sets},
    }
    main(run, validate(ContaminationConfig, tree, "test"))


def test_counts_and_some_overlaps_are_in_the_report(mixture, run_folder: Path, shards: Shards, tmp_path: Path):
    words = shards.tokenizer().decode(next(shards.documents("train")).tolist()).split()
    other = " ".join(f"word{number}" for number in range(20))
    quoted = [" ".join([f"w{number}"] * number + words[:20]) for number in range(QUOTED)]
    output = tmp_path / "overlaps.jsonl"
    assert contamination(RunRecord.read(run_folder)) == ""
    search(run_folder, output, lambada_openai=[other, *quoted, "two words"], lambada_standard=[other])
    path = run_folder / "eval/contamination@lambada_openai/results.json"
    results = json.loads(path.read_text())
    folders = list(map(str, mixture))
    assert results["identity"]["shards"] == dict.fromkeys(folders, shards.fingerprint)
    assert [row["folder"] for row in results["folders"]] == folders
    for row in results["folders"]:
        assert (row["examples"], row["checked"], row["overlapping"]) == (QUOTED + 2, QUOTED + 1, QUOTED)
        assert [overlap["example"] for overlap in row["largest"]] == [2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["shards"] for row in rows] == [folder for folder in folders for _ in range(QUOTED)]

    section = contamination(RunRecord.read(run_folder))
    assert section.count(f"| 7 | 6 | {QUOTED} (83.33%) |") == 2
    assert section.count("| 1 | 1 | 0 (0.00%) |") == 2
    assert section.count("| 8 of 8 |") == 2
    assert results["folders"][0]["largest"][0]["text"] in section
    assert "changed" not in section
    page = to_html(section, {}, "")
    assert page.count("<tr>") == 1 + 4 + 1 + 2 * 3
    assert "a|&lt;b&gt;_c_" in page
    assert "<b>" not in page

    results["folders"][0]["largest"][0]["text"] = "x" * 1000
    write_result_file(path, results)
    shutil.rmtree(mixture[1])
    section = contamination(RunRecord.read(run_folder))
    assert f"| {'x' * 200} … |" in section
    assert section.count("(missing or changed)") == 2
    assert f"tost eval contamination {run_folder} sets.NAME=FILE" in section


def test_a_run_without_checkpoint_is_rejected(mixture, run_folder: Path):
    shutil.rmtree(run_folder / "checkpoints")
    with pytest.raises(CheckpointError):
        search(run_folder, lambada_openai=["words"])
