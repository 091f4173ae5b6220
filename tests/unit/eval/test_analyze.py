"""`tost eval analyze`: output, results, report sections, rejected models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.eval.analysis import coding_rate, memberships
from tost_lm.eval.commands.analyze import main
from tost_lm.eval.sections import evaluation_sections
from tost_lm.eval.settings import AnalyzeConfig, TextConfig
from tost_lm.report import write_report
from tost_lm.report.page import Page
from tost_lm.report.record import EvaluatedModel, RunRecord

BY_POSITION = ("concentration_by_position", "score_spread_by_position", "explained_within_stretches")


def settings(**memberships) -> AnalyzeConfig:
    few = {"sequences": 3, "probe_tokens": 9, "context_tokens": [5, 7, 8, 50]}
    return validate(AnalyzeConfig, {"memberships": {**few, **memberships}}, "test")


def results_of(run: Path, protocol: str = "memberships@3") -> dict:
    return json.loads((run / f"eval/{protocol}/results.json").read_text())


@pytest.fixture
def analyzed(run_folder: Path, capsys):
    """Results of a protocol, printed text, and the report section with its figures."""

    def analyze(protocol: str, section: Callable[[EvaluatedModel, Page], str], **memberships):
        main(run_folder, settings(**memberships))
        page = Page("", figures="f")
        results, output = results_of(run_folder, protocol), capsys.readouterr().out
        return results, output, section(RunRecord.read(run_folder), page), page.charts

    return analyze


def test_contexts_beyond_the_positions_are_skipped(run_folder: Path, analyzed, capsys):
    results, output, section, charts = analyzed("memberships@3", memberships.section)
    assert "skipped contexts: 8, 50; the model has 16 positions" in output
    assert results["position_ends"] == [8, 16]
    assert [len(layer) for layer in results["concentration_by_position"]] == [2, 2]
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7]
    assert results["after_context"][0]["moved"] == [0, 0]
    assert min(results["after_context"][1]["moved"]) > 0
    main(run_folder, settings())
    assert "reusing" in capsys.readouterr().out
    assert "Checkpoint `step_00000100`" in section
    layer, other = results["after_context"][2]["moved"]
    assert f"| 7 | {results['after_context'][2]['nats_per_token']:.4f} | {layer:.3f} | {other:.3f} |" in section
    layer, other = results["concentration_by_position"]
    assert f"| 16 | {layer[1]:.3f} | {other[1]:.3f} |" in section
    assert charts["f/memberships"].rows == [
        [end, *[of_layer[i] for key in BY_POSITION for of_layer in results[key]]] for i, end in enumerate([8, 16])
    ]
    percentages = ", ".join(f"{fraction:.1%}" for fraction in results["explained_by_position"])
    assert f"Over all positions it explains {percentages} (by layer)" in section


def test_coding_rates_cover_all_retained_checkpoints(run_folder: Path, make_model, tokenizer, analyzed):
    first, _, _, charts = analyzed("coding_rate@2", coding_rate.section)
    assert [row["step"] for row in first["steps"]] == [100]
    assert "f/coding_rate_steps" not in charts
    model = make_model(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.blocks[1].mixer.in_proj.weight.mul_(2)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    write_checkpoint(run_folder / "checkpoints" / "step_00000300", model.config, model.state_dict(), tokenizer)
    weights = next((run_folder / "checkpoints" / "step_00000300").glob("model*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    results, output, section, charts = analyzed("coding_rate@2", coding_rate.section)
    assert f"skipped checkpoint: {weights}: damaged" in output
    assert [row["step"] for row in results["steps"]] == [100, 200]
    assert results["steps"][0] == first["steps"][0]
    assert results["steps"][1]["layers"] != first["steps"][0]["layers"]
    for step, own in zip(results["steps"][1]["layers"], results["layers"], strict=True):
        assert step == {name: own[name] for name in step}
    assert "Rates of the 2 retained checkpoints" in section
    assert "Skipped checkpoint: " in section
    assert [row[0] for row in charts["f/coding_rate_steps"].rows] == [100, 200]
    gap = results["layers"][1]["variational"]["mean"] - results["layers"][1]["coding"]["mean"]
    assert charts["f/coding_rate_steps"].rows[1][-1] == pytest.approx(gap)


def test_coding_rates_are_written_and_reported(run_folder: Path, analyzed, capsys):
    rates, output, section, charts = analyzed("coding_rate@2", coding_rate.section)
    assert "TSSA layer 2    R_c " in output
    assert rates["position_ends"] == [8, 16]
    assert len(rates["layers"]) == 2
    for number, found in enumerate(rates["layers"], start=1):
        assert found["coding"]["mean"] <= found["variational"]["mean"]
        assert found["coding_by_prefix"]["mean"][-1] == found["coding"]["mean"]
        change = found["variational_change"]
        assert f" | {change['mean']:+.4f} ± {change['standard_error']:.4f} | " in section
        assert f"\n| {number} | {found['coding']['mean']:.3f} ± " in section
    assert charts["f/coding_rate"].rows[1][1] == rates["layers"][1]["coding_change"]["mean"]
    prefixes = charts["f/coding_rate_prefixes"].rows
    assert [row[0] for row in prefixes] == [8, 16]
    assert prefixes[1][1:] == [
        layer[key]["mean"] for key in ("variational", "variational_change") for layer in rates["layers"]
    ]
    (run_folder / "eval/memberships@3/results.json").unlink()
    main(run_folder, settings())
    assert capsys.readouterr().out.startswith("reusing ")
    assert (run_folder / "eval/memberships@3/results.json").is_file()
    section = analyzed("coding_rate@2", coding_rate.section, sequences=1)[2]
    assert " ± " not in section.split("\n| 1 |")[1].split("\n")[0]


def test_a_model_folder_has_its_own_results_and_report(run_folder: Path, tmp_path: Path, shards, capsys):
    export = tmp_path / "export"
    shutil.copytree(run_folder / "checkpoints" / "step_00000100", export)
    with pytest.raises(ConfigError, match=r"has no shards; give heldout\.shards=FOLDER$"):
        main(export, settings())
    main(export, settings().model_copy(update={"heldout": TextConfig(shards=str(shards.folder))}))
    rates = results_of(export, "coding_rate@2")
    assert rates["steps"] == []
    write_report(export, evaluation_sections)
    report = (export / "report.md").read_text()
    assert report.startswith("# Model export\n")
    assert f"`tost eval zero-shot {export} heldout.shards=FOLDER`" in report
    assert "## Coding rates (coding\\_rate@2)" in report
    assert (export / "eval/report/coding_rate.pdf").read_bytes().startswith(b"%PDF")
    main(run_folder, settings())
    own = results_of(run_folder, "coding_rate@2")
    assert rates["layers"] == own["layers"]
    with pytest.raises(ConfigError, match="not a run folder but a checkpoint: "):
        write_report(run_folder / "checkpoints" / "step_00000100", evaluation_sections)


def test_a_model_of_unlimited_length_uses_all_contexts(run_folder: Path, make_model, tokenizer, capsys):
    model = make_model("TA", vocab_size=tokenizer.vocab_size, positions="none", tssa={"denom_bias": "head"})
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    main(run_folder, settings())
    assert "skipped contexts" not in capsys.readouterr().out
    results = results_of(run_folder)
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7, 8, 50]
    assert len(results["concentration_by_position"]) == 1


def test_a_model_with_one_position_is_rejected(run_folder: Path, make_model, tokenizer):
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=1)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=r"too short: model\.context_length=1;"):
        main(run_folder, settings())


@pytest.mark.parametrize("model", [{"pattern": "A"}, {"heads": 1}])
def test_a_model_without_several_tssa_heads_is_rejected(run_folder: Path, make_model, tokenizer, model):
    model = make_model(vocab_size=tokenizer.vocab_size, **model)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=f"^{run_folder}: no TSSA layer with several heads: "):
        main(run_folder, settings())


@pytest.mark.parametrize("amounts", [[0, 5], [5, 5], [7, 5]])
def test_context_tokens_increase(amounts: list[int]):
    with pytest.raises(ConfigError, match=r"memberships\.context_tokens: .* is not ascending"):
        settings(context_tokens=amounts)
