"""Report of a run: self-contained, with notes about missing, small or outdated results."""

import base64
import csv
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.inference.evaluated import SAMPLE, EvaluatedCheckpoint, read_result_file, write_result_file
from tost_lm.inference.settings import GenerateConfig
from tost_lm.page import Page as ReportPage
from tost_lm.page import to_html, to_markdown
from tost_lm.report import write_report
from tost_lm.report.comparison import comparison_sections
from tost_lm.report.record import RunRecord, group_runs
from tost_lm.report.run import run_sections
from tost_lm.tasks.heldout import NAME as HELDOUT
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.published import side_by_side

NASTY = (
    'x = `1`\n````\n</pre><script>alert(1)</script> & ![a](http://b/c.png) | "src="\n<img src="eval/report/loss.png">'
)


RESULTS: dict[str, dict[str, Any]] = {
    HELDOUT: {
        "model": {
            "documents": 27, "tokens": 1000, "bytes": 2500, "nats_per_token": 4.25, "perplexity_per_token": 70.1,
            "bits_per_byte": 2.4525, "bits_per_byte_standard_error": 0.0123,
        },
        "window_tokens": 16,
        "heldout_documents": 27,
    },
    NEEDLE: {
        "pattern": "T",
        "chance": 0.1,
        "cells": [
            {
                "length": length, "samples": 8,
                **{
                    f"{key}{ending}": value
                    for key, value in (
                        ("choice_accuracy", 0.25), ("exact_accuracy", 0.125), ("control_choice_accuracy", 0.0),
                        ("control_exact_accuracy", 0.0), ("gain_over_control", 1.5),
                    )
                    for ending in ("", "_standard_error")
                },
            }
            for length in (64, 128)
        ],
    },
    SAMPLE: {
        "prompt": NASTY, "text": f"{NASTY} again", "prompt_tokens": 9, "tokens": 5, "tokens_per_second": 100.0,
        "characters": len(NASTY) + 6, "kept_tokens": 0, "state_bytes_after_prompt": 288,
    },
}  # fmt: skip


@pytest.fixture
def evaluated(run_folder: Path) -> Path:
    evaluated = EvaluatedCheckpoint.find(run_folder)
    settings = validate(GenerateConfig, {}, "test")
    for protocol, results in RESULTS.items():
        evaluated.write_results(protocol, evaluated.identity(settings, evaluated.open_shards("")), 0.0, results)
    return run_folder


class Page(HTMLParser):
    """Tags with their attributes, visible text, and text of each code block."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.code: list[str] = []
        self.in_code = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self.in_code = True
            self.code.append("")

    def handle_endtag(self, tag):
        if tag == "pre":
            self.in_code = False

    def handle_data(self, data):
        self.text += data
        if self.in_code:
            self.code[-1] += data


def text_of(folder: Path) -> Page:
    """The page without drawing its figures."""
    run = RunRecord.read(folder)
    return Page(to_html(to_markdown(run_sections(run, ReportPage("", figures="f"))), {}, ""))


def test_the_page_is_self_contained_and_figures_are_also_files(evaluated):
    write_report(evaluated)
    page = Page((evaluated / "report.html").read_text())
    sources = [attributes["src"] or "" for _, attributes in page.tags if "src" in attributes]
    assert len(sources) == 2
    for source in sources:
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert not {"script", "link", "iframe", "a"} & {tag for tag, _ in page.tags}
    assert "url(" not in (evaluated / "report.html").read_text()
    shown = re.findall(r"^!\[[^\]]+\]\((.+)\)$", (evaluated / "report.md").read_text(), re.MULTILINE)
    assert shown == [f"eval/report/{name}.png" for name in ("retrieval", "loss")]
    assert all((evaluated / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    files = {f"{name}.{ending}" for name in ("loss", "retrieval") for ending in ("png", "csv")}
    assert {path.name for path in (evaluated / "eval/report").iterdir()} == files


def test_names_are_only_text_whatever_they_hold(evaluated):
    """Those of checkpoints, the run and its folder."""
    name = NASTY
    identity = (read_result_file(evaluated / "eval" / NEEDLE / "results.json") or {})["identity"]
    change_results(evaluated, NEEDLE, identity=identity | {"checkpoint": name, "checkpoint_sha256": ""})
    config = evaluated / "config.toml"
    config.write_text(config.read_text().replace('name = "tiny"', f"name = {json.dumps(name)}"))
    (evaluated / "eval" / SAMPLE / "results.json").unlink()
    evaluated = evaluated.rename(evaluated.with_name(name.replace("/", "")))
    page = Page(write_report(evaluated).read_text())
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 2
    assert all((attributes["src"] or "").startswith("data:image/png;base64,") for attributes in images)
    assert page.text.count(" ".join(name.split())) >= 2
    raw = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render((evaluated / "report.md").read_text()))
    tags = ["h1", "h2", "h3", "p", "blockquote", "strong", "code", "img", "table", "thead", "tbody", "tr", "th", "td"]
    assert not {tag for tag, _ in raw.tags} - {*tags}
    assert [tag for tag, _ in raw.tags].count("img") == 2


def test_results_that_were_edited_are_not_shown(evaluated):
    """In the report, its comparison, a table of models or a model card."""
    path = evaluated / "eval" / HELDOUT / "results.json"
    path.write_text(path.read_text().replace("2.4525", "1.4525"))
    problem = r"heldout@bpb/results\.json: damaged or edited, its hash differs from its content; remove it and run the "
    for read in (
        lambda: text_of(evaluated),
        lambda: to_markdown(comparison_sections(group_runs([RunRecord.read(evaluated)]), ReportPage("", figures="f"))),
        lambda: side_by_side([evaluated]),
        EvaluatedCheckpoint.find(evaluated).cited_results,
    ):
        with pytest.raises(ConfigError, match=problem):
            read()


def change_results(folder: Path, protocol: str, **changes: Any) -> None:
    path = folder / "eval" / protocol / "results.json"
    write_result_file(path, (read_result_file(path) or {}) | changes)


def cell_of_task(length: int, found: float, control: float) -> dict[str, Any]:
    return {
        "length": length, "samples": 4, "found_share": found, "control_found_share": control,
        "exact_accuracy": 0.125, "control_exact_accuracy": 0.0, "gain_over_control": 3.25,
        "found_share_standard_error": 0.25, "control_found_share_standard_error": 0.0,
        "exact_accuracy_standard_error": 0.0, "gain_over_control_standard_error": 0.5,
    }  # fmt: skip


def add_task(run: Path, name: str, *cells: dict[str, Any]) -> None:
    evaluated = EvaluatedCheckpoint.find(run)
    identity = evaluated.identity(None, None)
    evaluated.write_results(name, identity, 0.0, {"pattern": "T", "chance": 1e-7, "cells": cells, "threshold": 0.5})


def test_tasks_with_lengths_have_a_heatmap_and_a_table_by_length(run_folder):
    add_task(run_folder, "records@numbers", cell_of_task(2048, 0.6, 0.2))
    add_task(
        run_folder, "association@landmarks", cell_of_task(1024, 0.875, 0.0), cell_of_task(2048, 0.375, 0.125)
    )  # fmt: skip
    write_report(run_folder)
    text = " ".join(Page((run_folder / "report.html").read_text()).text.split())
    row = "association@landmarks < 0.1% 1,024 4 found 87.5% (39.6% to 98.7%) 0.0% 12.5% +3.250 ± 0.500 step_00000100"
    assert f"{row} association@landmarks < 0.1% 2,048 4 found 37.5%" in text
    assert "records@numbers < 0.1% 2,048 4 found 60.0% (20.5% to 89.7%) 20.0%" in text
    both = "mean score of association@landmarks, records@numbers at least 50.0%, tested at 2,048"
    assert (
        f"Effective length: < 2,048 tokens (< 2,048 to 2,048); {both}; in parentheses the 95 % interval over 8 t"
        in text
    )
    folder = run_folder / "eval/report"
    rows = list(csv.DictReader((folder / "retrieval.csv").read_text().splitlines()))
    assert [(row["task"], row["length"], row["found_share"], row["control_found_share"]) for row in rows] == [
        ("association@landmarks", "1024", "0.875", "0.0"), ("association@landmarks", "2048", "0.375", "0.125"),
        ("records@numbers", "2048", "0.6", "0.2"),
    ]  # fmt: skip
    assert (folder / "retrieval.png").read_bytes().startswith(b"\x89PNG")


def test_other_folders_are_rejected(tmp_path, run_folder):
    with pytest.raises(ConfigError, match="not a run folder"):
        write_report(tmp_path)
    (run_folder / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        write_report(run_folder)


@pytest.mark.parametrize("package", ["matplotlib", "markdown_it"])
def test_a_missing_package_names_the_install_command(run_folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}; run pip install '\.\[report\]'"):
        write_report(run_folder)


def test_a_model_folder_has_a_report_and_a_checkpoint_of_a_run_has_none(run_folder: Path, tmp_path: Path):
    export = tmp_path / "export"
    shutil.copytree(run_folder / "checkpoints" / "step_00000100", export)
    write_report(export)
    assert (export / "report.md").read_text().startswith("# Model export\n")
    with pytest.raises(ConfigError, match="not a run folder but a checkpoint: "):
        write_report(run_folder / "checkpoints" / "step_00000100")
