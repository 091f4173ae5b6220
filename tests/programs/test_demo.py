"""What `make demo` promises of its run: needs the run that it left, so it skips where the demo has not been made."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forked import CHECKOUT, ENVIRONMENT

RUN = CHECKOUT / "runs/demo"
pytestmark = pytest.mark.skipif(not (RUN / "report.html").exists(), reason="runs/demo is not there: `make demo` first")


def test_the_model_beats_the_byte_bigram_on_held_out_text():
    results = json.loads((RUN / "eval/heldout@bpb/results.json").read_text())
    baselines = {row["name"]: row["bits_per_byte"] for row in results["baselines"]}
    assert set(baselines) == {"byte unigram", "byte bigram", "byte trigram"}
    assert results["model"]["bits_per_byte"] < baselines["byte bigram"]


def test_the_run_stopped_and_went_on_without_a_step_twice_or_missing():
    steps = [json.loads(line)["step"] for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, *range(10, 161, 10)]
    assert "resuming from runs/demo/checkpoints/step_000000" in (RUN / "log.txt").read_text()
    assert list((RUN / "wandb").glob("offline-run-*"))


def test_the_report_holds_its_pictures_and_says_what_it_is():
    page = (RUN / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "smoke run and no benchmark" in page
    assert "beats the byte unigram and the byte bigram" in page


def test_a_rank_fits_4_gb(tmp_path: Path):
    (tmp_path / "data").symlink_to(CHECKOUT / "data")
    train = [sys.executable, "-m", "pretrain.train", str(CHECKOUT / "configs/pretrain/demo.toml"), "run.stop_step=3"]
    subprocess.run(train, cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4e9
