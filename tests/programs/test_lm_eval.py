"""The command line of lm-evaluation-harness on a checkpoint, and an error."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import ENVIRONMENT, Forked
from programs import linked, results, run

from tost_lm.errors import install_hint
from tost_lm.testing import FLOAT32_REORDERED

PROGRAM, QUICK = "tost lm-eval", "few_tasks"
LAMBADA = "lambada_openai@lm-eval"
TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {place}/documents.jsonl
  cache_dir: {place}/cache
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
output_type: loglikelihood
metric_list:
  - metric: acc
"""


@pytest.mark.slow
def test_the_harness_has_our_scores(prepared: Path, tmp_path: Path):
    run("tost train", "run.toml", "train.steps=1", cwd=linked(prepared, tmp_path))
    texts = [json.loads(line)["text"] for line in (prepared / "corpus.jsonl").read_text().split("\n")[:12]]
    rows = [json.dumps({"text": " ".join(text.split()[: 4 + number])}) for number, text in enumerate(texts)]
    (tmp_path / "documents.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "words.yaml").write_text(TASK.format(place=tmp_path))
    words = ["--model", "tost_lm", "--model_args", "pretrained=runs/tiny", "--tasks", "words.yaml"]
    printed = run(QUICK, *words, "--log_samples", "--output_path", "harness", cwd=tmp_path)
    assert printed.count("tost_lm ({'pretrained': 'runs/tiny'})") == 1
    [written] = (json.loads(path.read_text()) for path in (tmp_path / "harness").rglob("results_*.json"))
    [samples] = (tmp_path / "harness").rglob("samples_words_*.jsonl")
    nats = [-float(json.loads(line)["resps"][0][0][0]) for line in samples.read_text().splitlines()]
    run("tost eval", "runs/tiny", LAMBADA, "sets.lambada_openai=documents.jsonl", cwd=tmp_path)
    native = results(tmp_path / "runs/tiny", LAMBADA)
    assert np.mean(nats) == pytest.approx(native["model"]["nats_per_word"], rel=FLOAT32_REORDERED)
    assert written["config"]["checkpoint_sha256"] == native["identity"]["checkpoint_sha256"]


def test_an_error_is_one_line(tmp_path: Path):
    (tmp_path / "words.yaml").write_text(TASK.format(place=tmp_path))
    code, _, err = Forked(QUICK, "run", "--model", "tost_lm", "--tasks", "words.yaml", cwd=tmp_path).finish()
    assert code == 2, err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: --model_args of tost_lm: pretrained is missing; give pretrained=RUN")


def test_help_works_and_a_missing_harness_is_named(tmp_path: Path):
    script = (
        f"import runpy, sys\nsys.modules['lm_eval'] = None\nsys.argv = [*{PROGRAM.split()!r}, *sys.argv[1:]]\n"
        "runpy.run_module('tost_lm.cli.main', run_name='__main__')\n"
    )
    for words, code, printed in (
        (["--help"], 0, "tost lm-eval run --model tost_lm --model_args pretrained="),
        (["ls", "tasks"], 2, f"error: lm-evaluation-harness is not installed; {install_hint('lm-eval')}\n"),
    ):
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert printed in (done.stderr if code else done.stdout)
