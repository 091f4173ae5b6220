"""GPT-2 124M has its known results on WikiText-2 and LAMBADA, if its weights are beside the checkout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import ENVIRONMENT
from shared_data import SHARED

from tost_lm.tasks.published import MEASURED_GPT2, PUBLISHED

GPT2 = SHARED / "gpt2"
"""A folder of the Hugging Face library with GPT-2 124M and its tokenizer."""
SETS = {"wikitext2": "wiki.test.raw.gz", "lambada_openai": "lambada_test.jsonl.gz"}
KNOWN = [row for row in PUBLISHED if row.source == MEASURED_GPT2]


@pytest.mark.timeout(7200)
@pytest.mark.skipif(not GPT2.is_dir(), reason="../shared/data/gpt2 is not beside the checkout")
def test_gpt2_has_its_known_results(tmp_path: Path):
    (tmp_path / "gpt2").mkdir()  # results are written beside the weights
    for file in GPT2.iterdir():
        (tmp_path / "gpt2" / file.name).symlink_to(file)
    tasks = dict.fromkeys(row.task for row in KNOWN)
    words = [*tasks, *(f"sets.{name}={SHARED}/eval/{file}" for name, file in SETS.items())]
    command = [sys.executable, "-m", "tost_lm.cli.main", "eval", "gpt2", *words]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, check=True)
    for row in KNOWN:
        results = json.loads((tmp_path / f"gpt2/eval/{row.task}/results.json").read_text())
        assert results["model"][row.measure] == pytest.approx(row.value, rel=0.002), row
