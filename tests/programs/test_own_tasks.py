"""Tasks of a user: documents that a TOML file names, and a Python file that is run only if it is named."""

import json
from pathlib import Path

import pytest
from programs import linked, refusal, results, run, snapshot

from tost_lm.files import sha256_bytes

SUITE = """
tasks = ["laws"]
[documents.laws]
file = "laws.jsonl"
text = "body"
"""
OWN = """
from pathlib import Path
import numpy as np
from tost_lm.inference.requests import Request
from tost_lm.tasks.data_sets import SetFile
from tost_lm.tasks.own import register
from tost_lm.tasks.scored import Example, ScoredTask, accuracy_of
from tost_lm.tasks.task import Family

class Ends(ScoredTask):
    name, about, headline = "ends@mine", "whether a line goes on with an end of text", "accuracy"

    def __init__(self):
        pass

    def find_file(self, given, section="sets"):
        return SetFile(Path("laws.jsonl"), "0", None)

    def examples(self, path, tokenizer, window):
        ids = np.array(tokenizer.encode(path.read_text().split("\\n")[0])[:window])
        return [Example((Request(ids, np.array([tokenizer.eot])),), {})] * 3

    def row(self, example, scores):
        return {"right": bool(scores.is_greedy[0]), "nats": float(scores.nats[0])}

    def totals(self, rows):
        return {"accuracy": accuracy_of(rows)["accuracy"], "lines": len(rows)}

Path("marker").touch()
register(Family("mine", [Ends()]))
"""


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a suite of own documents, and the file of an own task."""
    folder = linked(prepared, tmp_path_factory.mktemp("own"))
    run("tost train", "run.toml", "train.steps=2", cwd=folder)
    documents = [{"body": "some words of a law", "title": "A"}, {"body": "another text " * 30, "title": "B"}]
    (folder / "laws.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    (folder / "suite.toml").write_text(SUITE)
    (folder / "mine.py").write_text(OWN)
    return folder


def test_a_toml_file_names_documents(trained: Path):
    run("tost eval", "runs/tiny", "suite.toml", cwd=trained)
    laws = results(trained / "runs/tiny", "laws@documents")["model"]
    text = [json.loads(line)["body"] for line in (trained / "laws.jsonl").read_text().splitlines()]
    assert (laws["examples"], laws["bytes"]) == (2, sum(len(one.encode()) for one in text))
    assert laws["bits_per_byte_standard_error"] > 0
    titles = ["laws", "documents.laws.file=laws.jsonl", "documents.laws.text=title"]
    assert "another task_sha256" in run("tost eval", "runs/tiny", *titles, cwd=trained)
    run("tost report", "runs/tiny", cwd=trained)
    assert "| laws@documents | bits per byte | " in (trained / "runs/tiny/report.md").read_text()


@pytest.mark.quick
def test_a_file_that_is_named_is_run_and_identifies_its_results(trained: Path):
    run("tost eval", "runs/tiny", "mine.py", cwd=trained)
    assert (trained / "marker").exists()
    assert results(trained / "runs/tiny", "ends@mine")["model"]["lines"] == 3
    assert results(trained / "runs/tiny", "ends@mine")["identity"]["task_sha256"] == sha256_bytes(OWN.encode())
    (trained / "marker").unlink()
    assert "reusing" in run("tost eval", "runs/tiny", "mine.py", cwd=trained)
    (trained / "marker").unlink()
    run("tost report", "runs/tiny", cwd=trained)
    run("tost compare", "runs/tiny", cwd=trained)
    assert not (trained / "marker").exists()
    (trained / "mine.py").write_text(OWN + "# changed\n")
    assert "another task_sha256" in run("tost eval", "runs/tiny", "mine.py", cwd=trained)


def with_faults(faults: dict[str, tuple[str, str]]) -> str:
    """A file with a task for each fault: a method of `Ends` and its body, which is on the last line."""
    tasks = [
        f"class {name}(Ends):\n    name = '{name}@own'\n    def {method}:\n        {body}  # {name}\n"
        for name, (method, body) in faults.items()
    ]
    end = f"register(Family('own', [{', '.join(f'{name}()' for name in faults)}]))\n"
    return "".join([OWN.partition('Path("marker")')[0], *tasks, end])


FAULTS = {
    "Raises": ("examples(self, path, tokenizer, window)", "raise RuntimeError('no\\nlines')"),
    "Empty": ("examples(self, path, tokenizer, window)", "return []"),
    "NoExample": ("examples(self, path, tokenizer, window)", "return ['text']"),
    "NoScore": ("row(self, example, scores)", "return {'right': scores['right']}"),
    "NoResult": ("totals(self, rows)", "return {'accuracy': float('nan')}"),
    "NoJson": ("row(self, example, scores)", "return {'right': True, 'set': {1, 2}}"),
    "Exits": ("row(self, example, scores)", "raise SystemExit(0)"),
}
MESSAGES = {
    "Raises": "RuntimeError: no\\nlines (line {line}); correct the file",
    "NoExample": "AttributeError: 'str' object has no attribute 'requests'; correct the file",
    "NoScore": "TypeError: tuple indices must be integers or slices, not str (line {line}); correct the file",
    "NoResult": "ValueError: Out of range float values are not JSON compliant; correct the file",
    "Exits": "SystemExit: 0 (line {line}); correct the file",
    "NoJson": "TypeError: Object of type set is not JSON serializable; correct the file",
}


def test_tasks_that_fail_are_one_line_each_and_the_others_run(trained: Path):
    text = with_faults(FAULTS)
    (trained / "faults.py").write_text(text)
    lines = {name: 1 + text[: text.index(f"# {name}\n")].count("\n") for name in FAULTS}
    (trained / "runs/tiny/eval/ends@mine/results.json").unlink(missing_ok=True)
    problems = refusal("tost eval", "runs/tiny", "faults.py", "mine.py", cwd=trained).splitlines()
    expected = {f"{name}@own: faults.py: {MESSAGES[name].format(line=lines[name])}" for name in MESSAGES}
    assert {*problems} == expected | {"Empty@own: the task has no examples; give it a file with some"}
    assert len(problems) == len(FAULTS)
    assert results(trained / "runs/tiny", "ends@mine")["model"]["lines"] == 3
    assert not list(trained.glob("runs/tiny/eval/*@own/results.json"))


@pytest.mark.parametrize("fault", ["Raises", "NoScore"])
def test_a_task_that_fails_in_training_is_one_line(trained: Path, tmp_path: Path, fault: str):
    """Before the first step, or after it."""
    (linked(trained, tmp_path) / "laws.jsonl").symlink_to(trained / "laws.jsonl")
    (tmp_path / "faults.py").write_text(with_faults({fault: FAULTS[fault]}))
    words = ["train.steps=1", "evaluation.interval=1", 'evaluation.tasks=["faults.py"]']
    problem = refusal("tost train", "run.toml", *words, cwd=tmp_path)
    assert problem.startswith(f"faults.py: {MESSAGES[fault].partition(' (')[0]} (line ")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("file", "words", "problem"),
    [
        ("", ["own.py"], "own.py: registers no family; call tost_lm.tasks.own.register in it"),
        (OWN.replace('"mine"', '"needle"'), ["own.py"], "own.py: the name needle is taken; choose another one"),
        (OWN.replace("name, about", "names, about"), ["own.py"], "own.py: Ends has no name; set it"),
        ("", ["nowhere.py"], "nowhere.py: cannot be read: No such file or directory; name a Python file"),
        ("", ["a", "documents.a.file=laws.jsonl"], 'laws.jsonl, line 1: no text under "text"; name its field'),
    ],
)
def test_mistakes_are_one_line(trained: Path, file: str, words: list[str], problem: str):
    (trained / "own.py").write_text(file)
    before = snapshot(trained / "runs")
    output = refusal("tost eval", "runs/tiny", *words, cwd=trained)
    assert problem in output
    assert "\n" not in output
    assert snapshot(trained / "runs") == before
