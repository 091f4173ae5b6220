"""The family `context` on a run: files of cells, reuse, and the section of the report."""

import csv
import json
import re
from pathlib import Path

from evaluations import CONTEXT, evaluate

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.markdown import escape
from tost_lm.report import write_report

COPYING, CONTEXT_GAIN, MANY_SHOT_SEEN, MANY_SHOT_UNSEEN, PASSAGES = CONTEXT


def test_the_command_writes_cells_and_the_report_shows_them(run_folder: Path, make_model, tokenizer, capsys):
    checkpoint = run_folder / "checkpoints" / "step_00000200"
    model = make_model("A", tokenizer.vocab_size, 400)
    write_checkpoint(checkpoint, model.config, model.state_dict(), tokenizer)
    pages = (f"Page {page}. The lines of page {page} are short.\nNo.\n" for page in range(60))
    (run_folder / "book.txt").write_text("".join(pages))
    tree = {
        "target_tokens": 6,
        "samples": 3,
        "lengths": [60],
        "shots": [8, 16],
        "passages": [1],
        "samples_folder": run_folder / "samples",
    }
    tree["haystack"] = run_folder / "book.txt"
    evaluate(run_folder, "context", context=tree)
    printed = capsys.readouterr().out
    for name in CONTEXT:
        results = json.loads((run_folder / "eval" / name / "results.json").read_text())
        files = sorted((run_folder / "eval" / name / "cells").iterdir())
        assert len(results["cells"]) == len(files) == (2 if "many_shot" in name else 1)
        cell = json.loads(files[0].read_text())
        assert results["cells"][0].items() <= cell.items()
        assert results["identity"]["checkpoint"] == "step_00000200"
        assert results["identity"]["settings"]["seed"] == 0
        assert len(cell["examples"]) == 3 * (3 if "text" in name else 2)
        assert cell["gain_over_control_standard_error"] >= 0
        assert f"{name}: length " in printed
    (run_folder / "eval" / PASSAGES / "results.json").unlink()
    evaluate(run_folder, "context", context=tree)
    printed = capsys.readouterr().out
    assert f"{PASSAGES}: reusing 1 of 1 cells" in printed
    assert printed.count("reusing ") == len(CONTEXT)

    write_report(run_folder)
    text = (run_folder / "report.md").read_text()
    assert f"### {escape(MANY_SHOT_SEEN)} (chance 12%)" in text
    assert re.search(
        r"\| +60 \| +45 \| +3 \| .* ± .* \(.*\) \| [+-]\d\.\d+ ± \d\.\d+ \| [+-]\d\.\d+ ± \d\.\d+ \|\n", text
    )
    header, *rows = csv.reader((run_folder / "eval/report/context.csv").read_text().splitlines())
    assert header[:4] == ["task", "length (tokens)", "examples", "gain (nats/token)"]
    assert [row[0] for row in rows] == [COPYING, CONTEXT_GAIN, *[MANY_SHOT_SEEN] * 2, *[MANY_SHOT_UNSEEN] * 2, PASSAGES]
