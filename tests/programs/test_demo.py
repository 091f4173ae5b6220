"""The run that `make demo` leaves."""

import json
import math
import re
import resource
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
from forked import CHECKOUT, ENVIRONMENT

from tost_lm.data.shards import Shards


@pytest.fixture
def demo(in_ci: bool) -> Path:
    """The folder of the run. CI makes it before the tests, so that it must be there."""
    run = CHECKOUT / "runs/demo"
    if not (run / "report.html").exists():
        (pytest.fail if in_ci else pytest.skip)("run make demo first")
    return run


@pytest.mark.quick
def test_the_model_beats_the_byte_bigram_on_held_out_text(demo: Path):
    """And not only one of other text: a bigram with the probabilities of this text itself."""
    results = json.loads((demo / "eval/heldout@bpb/results.json").read_text())
    shards = Shards.open(CHECKOUT / results["identity"]["shards"])
    texts = list(islice(map(str.encode, shards.texts("valid")), results["model"]["documents"]))
    pairs = Counter(pair for text in texts for pair in pairwise(text))
    firsts = Counter(byte for text in texts for byte in text[:-1])
    bits = -sum(count * math.log2(count / firsts[pair[0]]) for pair, count in pairs.items())
    assert results["model"]["bits_per_byte"] < bits / pairs.total()


@pytest.mark.quick
def test_the_run_stopped_and_resumed_without_a_repeated_or_missing_step(demo: Path):
    steps = [json.loads(line)["step"] for line in (demo / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, *range(10, 121, 10)]
    assert "resuming from runs/demo/checkpoints/step_000000" in (demo / "log.txt").read_text()
    assert list((demo / "wandb").glob("offline-run-*"))


@pytest.mark.quick
def test_the_report_has_its_figures_and_is_marked_as_a_smoke_run(demo: Path):
    page = (demo / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "smoke run, not a benchmark" in page


@pytest.mark.quick
@pytest.mark.usefixtures("demo")
def test_the_model_that_trained_on_passages_finds_needles():
    """More than a guess among the five words finds, at the trained length and at four times it; the bounds leave room
    for the weights that other processors train to. A guess among a control's six candidates is right once in six."""
    results = json.loads((CHECKOUT / "runs/recall/eval/needle@keys/results.json").read_text())
    scores = {cell["length"]: cell for cell in results["cells"]}
    assert scores[256]["choice_accuracy"] >= 0.7
    assert scores[1024]["choice_accuracy"] >= 0.55
    assert "needle@keys" in (CHECKOUT / "runs/recall/report.html").read_text()
    assert all(scores[length]["control_choice_accuracy"] < 0.3 for length in (256, 1024, 4096))


@pytest.mark.quick
@pytest.mark.usefixtures("demo")
def test_the_quick_start_shows_what_the_demo_prints():
    """Times and ranks are those of another machine, which adds in another order: losses and accuracies are near."""
    run = CHECKOUT / "runs/recall"
    log = [line[len("2026-11-25 23:53:16 ") :] for line in (run / "log.txt").read_text().splitlines()]
    printed = [*log, *(run / "report.md").read_text().splitlines()]
    (shown,) = re.findall(r"```text\n(.+?)```", (CHECKOUT / "docs/quickstart.md").read_text(), re.DOTALL)
    assert len(shown.splitlines()) <= 12
    assert [line for line in shown.splitlines() if not any(is_near(line, other) for other in printed)] == []


NUMBER = r"\d[\d.,]*(?:e-\d+)?%?"
OF_THE_MACHINE = r"grad norm \S+|\S+ tokens/s/device|\S+ TFLOP/s|ETA \S+|\d+ ranks? on \w+"
"""Times, the norm of a single batch, and the ranks: one for each GPU."""


def is_near(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, and near numbers."""
    shown, printed = (re.sub(OF_THE_MACHINE, "", line) for line in (shown, printed))
    numbers, others = (re.findall(NUMBER, line) for line in (shown, printed))
    same_words = re.sub(NUMBER, "#", shown) == re.sub(NUMBER, "#", printed)
    return same_words and all(map(is_near_number, numbers, others))


def is_near_number(shown: str, printed: str) -> bool:
    """Equal; of 40 answers within 15 %; of losses within a tenth."""
    a, b = (float(number.strip("%").replace(",", "")) for number in (shown, printed))
    tolerance = 15 if "%" in shown else 0.1 * a if "." in shown else 0
    return abs(a - b) <= tolerance


@pytest.mark.usefixtures("demo")
def test_a_rank_needs_less_than_4_gb(tmp_path: Path):
    (tmp_path / "data").symlink_to(CHECKOUT / "data")
    settings = [str(CHECKOUT / "configs/pretrain/demo.toml"), "run.stop_at_step=3"]
    train = [sys.executable, "-m", "tost_lm.pretrain.commands.train", *settings]
    subprocess.run(train, cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4e9
