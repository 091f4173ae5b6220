"""The command line of lm-evaluation-harness on a checkpoint, and an error."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import ENVIRONMENT, Forked
from programs import results, run

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import read_tokenizer
from tost_lm.errors import install_hint
from tost_lm.model import ModelConfig, TostLM
from tost_lm.testing import FLOAT32_REORDERED

PROGRAM, QUICK = "tost lm-eval", "few_tasks"
LAMBADA = "lambada_openai@lm-eval"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {place}/documents.jsonl
  cache_dir: {place}/cache
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
output_type: {output_type}
metric_list:
"""
OF_WORDS = "  - metric: acc\n"
OF_TEXTS = "  - metric: exact_match\ngeneration_kwargs:\n  until: [e]\n  max_gen_toks: 5\n  do_sample: false\n"


@pytest.fixture(scope="module")
def place(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, documents, a scoring task and a generating task."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = read_tokenizer(prepared / "out/tokenizer.model")
    tree = {"layers": 2, "heads": 2, "width": 16, "vocab_size": tokenizer.vocab_size, "max_positions": 64}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, tree, "test"))
    write_checkpoint(folder / "export", model.config, model.state_dict(), tokenizer)
    texts = [json.loads(line)["text"] for line in (prepared / "corpus.jsonl").read_text().split("\n")[:12]]
    rows = [json.dumps({"text": " ".join(text.split()[: 4 + number])}) for number, text in enumerate(texts)]
    (folder / "documents.jsonl").write_text("\n".join(rows) + "\n")
    for name, output_type, rest in (("words", "loglikelihood", OF_WORDS), ("texts", "generate_until", OF_TEXTS)):
        task = TASK.format(name=name, place=folder, output_type=output_type) + rest
        (folder / f"{name}.yaml").write_text(task)
    return folder


@pytest.mark.slow
def test_the_harness_has_our_scores(place: Path):
    words = ["--model", "tost_lm", "--model_args", "pretrained=export", "--tasks", "words.yaml", "texts.yaml"]
    printed = run(QUICK, *words, "--log_samples", "--output_path", "out", cwd=place)
    assert printed.count("tost_lm ({'pretrained': 'export'})") == 1
    [written] = (json.loads(path.read_text()) for path in (place / "out").rglob("results_*.json"))
    answers = {}
    for task in ("words", "texts"):
        [samples] = (place / "out").rglob(f"samples_{task}_*.jsonl")
        answers[task] = [json.loads(line)["resps"][0][0] for line in samples.read_text().split("\n")[:-1]]
    run("tost eval", "export", LAMBADA, "sets.lambada_openai=documents.jsonl", cwd=place)
    native = results(place / "export", LAMBADA)
    nats = [-float(total) for total, _ in answers["words"]]
    assert np.mean(nats) == pytest.approx(native["model"]["nats_per_word"], rel=FLOAT32_REORDERED)
    assert written["config"]["checkpoint_sha256"] == native["identity"]["checkpoint_sha256"]
    assert len(set(answers["texts"])) > 6


def test_an_error_is_one_line(place: Path):
    code, _, err = Forked(QUICK, "run", "--model", "tost_lm", "--tasks", "texts.yaml", cwd=place).finish()
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
