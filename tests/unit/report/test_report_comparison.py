"""Report of several runs: groups by settings, means over seeds, and limitations of the comparison."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tost_lm.config import leaves, to_toml, validate
from tost_lm.errors import ConfigError
from tost_lm.files import write_rows
from tost_lm.inference.evaluated import write_result_file
from tost_lm.page import Page, to_markdown
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.report import write_comparison
from tost_lm.report.comparison import comparison_sections
from tost_lm.report.record import compared_settings, group_runs, read_runs
from tost_lm.tasks.grid import ACCURACIES
from tost_lm.tasks.heldout import NAME as HELDOUT
from tost_lm.tasks.needle import NAME as NEEDLE

MakeRun = Callable[..., Path]
PARAMETERS = "12,692 (1,024 in positions)"


def settings(**sections: dict[str, Any]) -> PretrainConfig:
    tree: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "heads": 2, "width": 16, "vocab_size": 384, "max_positions": 64},
        "data": {"folder": "out/shards"},
        "train": {"steps": 100, "global_batch_size": 4, "micro_batch_size": 1, "seq_len": 32},
        "run": {"name": "any"},
    }
    return validate(
        PretrainConfig, {key: {**tree.get(key, {}), **sections.get(key, {})} for key in {**tree, **sections}}, "test"
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Run folders without checkpoints, which the comparison does not need."""

    def make(name: str, losses: Sequence[float | None], every: int = 10, speed: float = 100.0, **sections: Any) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(settings(**sections)))
        rows = [
            {"step": step * every, "loss": loss, "tokens": 1, "seconds": 1.0, "tokens_per_second_device": speed}
            for step, loss in enumerate(losses, start=1)
        ]
        write_rows(folder / "metrics.jsonl", rows)
        return folder

    return make


@pytest.fixture
def two_groups(make_run: MakeRun) -> tuple[Path, Path, Path]:
    """Two runs of one group with different seeds, and a run of another group."""
    return make_run("a", [6.0]), make_run("b", [6.0], train={"seed": 1}), make_run("c", [6.0], optim={"lr": 0.5})


def add_validation(folder: Path, step: int, *by_position: float, tokens: int = 128) -> None:
    row = {"step": step, "loss": by_position[-1], "position_ends": [8, 16], "loss_by_position": by_position}
    write_rows(folder / "validation.jsonl", [{**row, "tokens": tokens}])


def write_results(folder: Path, protocol: str, step: int, shards: str = "a", **results: Any) -> None:
    path = folder / "eval" / protocol / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = {"step": step, "shards_fingerprint": shards, "settings": {}}
    write_result_file(path, {"identity": identity, **results})


def add_results(folder: Path, protocol: str, step: int, score: float, shards: str = "a") -> None:
    cells = [{"samples": 8, "choice_accuracy": score, "choice_accuracy_standard_error": None}]
    write_results(folder, protocol, step, shards, model={"bits_per_byte": score}, cells=cells)


def add_task(folder: Path, name: str, step: int, found: Sequence[float]) -> None:
    """One score per length; the control, which RULER lacks, has a tenth of it."""
    controls = () if "@lm-eval" in name else ("control_found_share", "control_choice_accuracy")
    cells = [
        {
            "length": 1024 * number, "samples": 8,
            **dict.fromkeys(("found_share", "choice_accuracy"), score),
            **dict.fromkeys(controls, score / 10),
            **dict.fromkeys((f"{of}{key}_standard_error" for of in ("", "control_") for key in ACCURACIES), None),
        }
        for number, score in enumerate(found, start=1)
    ]  # fmt: skip
    write_results(folder, name, step, chance=0.1, cells=cells)


def compare(*folders: Path) -> tuple[str, Page]:
    """The text without Markdown escapes, and the page."""
    page = Page("compared", figures="figures")
    return to_markdown(comparison_sections(group_runs(read_runs(folders)), page)).replace("\\", ""), page


def table(text: str, section: str) -> list[list[str]]:
    lines = [line for line in text.split(f"## {section}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(header)
    return [header, *rows]


def test_runs_are_grouped_by_settings(make_run):
    ignored = {"run": {"name": "other", "log_interval": 3}, "parallel": {"zero_stage": 2},
                   "checkpoint": {"interval": 7},
                   "validation": {"interval": 5}, "data": {"workers": 3}}  # fmt: skip
    runs = [
        make_run("a", [5.0], train={"seed": 1}),
        make_run("b", [5.0], optim={"lr": 0.5}),
        make_run("c", [5.0], train={"seed": 2, "micro_batch_size": 2}, **ignored),
        make_run("d", [5.0], optim={"lr": 0.5}, train={"seed": 1, "skip_spike_sigma": 6.0}),
    ]
    text, _ = compare(*runs)
    lr = settings().optim.lr
    assert table(text, "Groups") == [
        ["group", "optim.lr", "train.skip_spike_sigma", "parameters", "runs"],
        ["1", str(lr), "–", PARAMETERS, f"{runs[0]}, {runs[2]}"],
        ["2", "0.5", "–", PARAMETERS, str(runs[1])],
        ["3", "0.5", "6.0", PARAMETERS, str(runs[3])],
    ]


def test_groups_ignore_the_seed_and_settings_that_may_change_on_resume():
    config = settings(
        train={"micro_batch_size": 2, "seed": 3}, data={"workers": 2}, checkpoint={"interval": 1},
        run={"log_interval": 1}, validation={"interval": 1}, parallel={"tensor": 2}, optim={"warmup_steps": 2},
    )  # fmt: skip
    tree = json.loads(config.model_dump_json(exclude_none=True))
    trained = dict(leaves(config.in_stages()[0].what_is_trained()))
    changed = {path for path, value in leaves(tree) if path not in trained or trained[path] != value}
    uncompared = {path for path, _ in leaves(tree)} - set(compared_settings(tree))
    assert uncompared == changed - {"stages"} | {"train.seed"}


def test_metrics_are_means_with_standard_errors(make_run):
    a = make_run("a", [6.0, 5.0], train={"seed": 0}, speed=100)
    b = make_run("b", [6.5, 5.5], train={"seed": 1}, speed=300)
    c = make_run("c", [6.0, 4.0], optim={"lr": 0.5})
    for run, by_position in ((a, (5.0, 4.0)), (b, (5.5, 4.25))):
        add_validation(run, 20, *by_position)
    add_results(a, HELDOUT, 20, 2.0)
    add_results(b, HELDOUT, 20, 2.5)
    add_results(b, NEEDLE, 10, 0.25)
    text, page = compare(a, b, c)
    header, first, second = table(text, "Results")
    assert header == [
        "group", "runs", "step", "training loss", "validation loss", "needle choice accuracy",
        "held-out bits per byte", "tokens/s/device",
    ]  # fmt: skip
    lr = settings().optim.lr
    labels = f"1: optim.lr={lr}", "2: optim.lr=0.5"
    assert first == [
        labels[0], "2", "20", "5.2500 ± 0.2500", "4.1250 ± 0.1250", "25.0% (step 10, 1 of 2 runs)", "2.2500 ± 0.2500",
        "200 ± 100",
    ]  # fmt: skip
    assert second == [labels[1], "1", "20", "4.0000", "–", "–", "–", "100"]
    assert re.findall("^## (.*)", text, re.MULTILINE)[:2] == ["Results", "Validation loss"]
    assert table(text, "Individual runs")[2] == [
        str(b), "1", "1", "20", "5.5000", "4.2500", "25.0% (step 10)", "2.5000", "300",
    ]  # fmt: skip

    first, second = labels
    header, *rows = csv.reader(page.charts["figures/loss"].table().splitlines())
    assert header == [
        "step", f"{first}: mean (nats/token)", f"{first}: standard error (nats/token)", f"{second}: mean (nats/token)",
    ]  # fmt: skip
    assert rows == [["10", "6.25", "0.25", "6.0"], ["20", "5.25", "0.25", "4.0"]]
    header, *rows = csv.reader(page.charts["figures/position"].table().splitlines())
    assert header[1] == f"{first}, step 20: mean (nats/token)"
    assert rows == [["8", "5.25", "0.25"], ["16", "4.125", "0.125"]]


def test_groups_with_common_seeds_are_compared_by_seed(make_run):
    a = [make_run(f"a{seed}", [6.0], train={"seed": seed}) for seed in range(3)]
    b = [make_run(f"b{seed}", [6.0], train={"seed": seed}, optim={"lr": 0.5}) for seed in (2, 1)]
    for run, loss in zip([*a, *b], (3.0, 4.0, 5.5, 5.0, 3.75), strict=True):
        add_validation(run, 10, 9.0, loss)
    _, first, second = table(compare(*a, *b)[0], "Differences paired by seed")
    assert first[1:] == ["3", "0.0000 ± 0.0000"]
    assert second[1:] == ["2", "-0.3750 ± 0.1250"]
    assert "Differences paired by seed" not in compare(*a)[0]
    assert "Differences paired by seed" not in compare(a[0], *b)[0]


def test_retrieval_has_a_column_for_each_group(two_groups):
    a, b, c = two_groups
    add_task(a, NEEDLE, 10, [0.5, 0.25])
    assert "## Scores by length" not in compare(a, b, c)[0]
    add_task(b, NEEDLE, 10, [0.75, 0.25])
    add_task(c, "ruler_vt@lm-eval", 10, [0.4])
    text, _ = compare(a, b, c)
    assert table(text, "Scores by length") == [
        ["task", "tokens", "chance", "group 1", "group 2"],
        [NEEDLE, "1,024", "10%", "62.5% (texts 38.6% to 81.5%, seeds 50.0% to 75.0%; control 6.2%)", "–"],
        [NEEDLE, "2,048", "10%", "25.0% (texts 10.2% to 49.5%, seeds 25.0% to 25.0%; control 2.5%)", "–"],
        ["ruler_vt@lm-eval", "1,024", "10%", "–", "40.0% (texts 15.2% to 71.3%)"],
    ]
    add_task(a, "ruler_vt@lm-eval", 10, [0.4])
    add_task(b, "ruler_vt@lm-eval", 20, [0.4])
    text, _ = compare(a, b, c)
    assert "results of ruler_vt@lm-eval in group 1 have no mean: the steps differ" in text
    assert table(text, "Scores by length")[3][3:] == ["–", "40.0% (texts 15.2% to 71.3%)"]


def test_runs_are_compared_at_their_last_common_step(make_run):
    a = make_run("a", [6.0, 5.0, 4.0], train={"seed": 0})
    b = make_run("b", [6.5, 5.5], train={"seed": 1})
    text, page = compare(a, b)
    assert (
        f"group 1 ended at different steps ({a} at 30, {b} at 20) and are compared at their last common step 20."
        in text
    )
    assert table(text, "Results")[1][2:4] == ["20", "5.2500 ± 0.2500"]
    assert [row[0] for row in page.charts["figures/loss"].rows] == [10, 20]
    assert [row[3:5] for row in table(text, "Individual runs")[1:]] == [["30", "4.0000"], ["20", "5.5000"]]

    other = make_run("c", [6.0], every=7, train={"seed": 2})
    text, page = compare(a, other)
    assert "not compared (no common step)" in text
    assert table(text, "Results")[1][2] == "–"
    assert not page.charts


def test_limitations_are_listed(make_run):
    a, b = make_run("a", [6.0]), make_run("b", [6.0])
    c = make_run("c", [6.0], data={"folder": "other/shards"})
    text, _ = compare(a, b)
    assert "Some runs of group 1 have the same seed" in text
    assert "different training data" not in text
    add_results(a, HELDOUT, 10, 2.0)
    add_results(b, HELDOUT, 20, 2.0)
    add_results(c, HELDOUT, 10, 2.0, shards="other")
    add_validation(a, 10, 5.0, 4.0)
    add_validation(c, 10, 5.0, 4.0, tokens=64)
    text, _ = compare(a, b, c)
    assert "different training data" in text
    assert f"results of {HELDOUT} in group 1 have no mean: the steps differ ({a} after 10, {b} after 20)" in text
    assert f"results of {HELDOUT} are from different texts" in text
    assert "validation losses are from different numbers of tokens" in text
    assert [row[5] for row in table(text, "Results")[1:]] == ["–", "2.0000"]


def test_files_are_reproducible(make_run, tmp_path):
    runs = [make_run("a", [6.0, 5.0], train={"seed": 0}), make_run("b", [6.5, 5.5], train={"seed": 1})]

    def written() -> dict[str, bytes]:
        written = write_comparison(runs, tmp_path / "out")
        assert written == tmp_path / "out/report.html"
        return {
            str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()
        }

    files = written()
    assert set(files) == {"report.html", "report.md", *[f"figures/loss.{ending}" for ending in ("png", "csv")]}
    assert files["report.html"].count(b"data:image/png;base64,") == 1
    assert written() == files


def test_invalid_comparisons_are_rejected(make_run, tmp_path):
    a, b = make_run("a", [6.0]), make_run("b", [6.0])
    with pytest.raises(ConfigError, match=rf"^not a run folder.*: {b.parent};"):
        write_comparison([a, b.parent], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^a run is listed twice: .*runs/a;"):
        write_comparison([a, b, b.parent / ".." / "runs" / "a"], tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"^report\.folder is a run folder: {b};"):
        write_comparison([a, b], b)
    (b / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=rf"^a run has no metrics: {b}/metrics\.jsonl;"):
        write_comparison([a, b], tmp_path / "out")
    assert not (tmp_path / "out").exists()
