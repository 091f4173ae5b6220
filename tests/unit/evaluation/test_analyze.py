"""eval.analyze: what it prints and keeps, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from eval.analyze import main
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import AnalyzeConfig, TextConfig
from tost_lm.evaluation.report import write_report
from tost_lm.evaluation.report.analysis.coding_rate import coding_rates
from tost_lm.evaluation.report.analysis.influence import influence
from tost_lm.evaluation.report.analysis.memberships import memberships_of_run
from tost_lm.evaluation.report.analysis.stream import stream
from tost_lm.evaluation.report.analysis.subspaces import subspaces
from tost_lm.evaluation.report.analysis.swaps import swaps
from tost_lm.evaluation.report.analysis.tokens import tokens
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.model.checkpoint import write_checkpoint

BY_POSITION = ("concentration_by_position", "score_spread_by_position", "explained_within_stretches")


def settings(**memberships) -> AnalyzeConfig:
    few = {"sequences": 3, "probe_tokens": 9, "context_tokens": [5, 7, 8, 50]}
    return validate(AnalyzeConfig, {"memberships": {**few, **memberships}}, "test")


def results_of(run: Path) -> dict:
    return json.loads((run / "eval/memberships@3/results.json").read_text())


def test_of_a_model_with_a_limit_what_passes_it_is_left_out(run_folder: Path, capsys):
    main(run_folder, settings())
    said = capsys.readouterr().out
    assert "not after 8, 50: the model reads 16 tokens at most" in said
    results = results_of(run_folder)
    assert results["position_ends"] == [8, 16]
    assert [len(layer) for layer in results["concentration_by_position"]] == [2, 2]
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7]
    assert results["after_context"][0]["moved"] == [0, 0]
    assert min(results["after_context"][1]["moved"]) > 0
    main(run_folder, settings())
    assert "reusing" in capsys.readouterr().out
    page = Page("", figures="f")
    section = memberships_of_run(RunRecord.read(run_folder), page)
    assert "Of `step_00000100`" in section
    layer, other = results["after_context"][2]["moved"]
    assert f"| 7 | {results['after_context'][2]['nats_per_token']:.4f} | {layer:.3f} | {other:.3f} |" in section
    layer, other = results["concentration_by_position"]
    assert f"| 16 | {layer[1]:.3f} | {other[1]:.3f} |" in section
    assert page.charts["f/memberships"].rows == [
        [end, *[of_layer[i] for key in BY_POSITION for of_layer in results[key]]] for i, end in enumerate([8, 16])
    ]
    told = ", ".join(f"{share:.1%}" for share in results["explained_by_position"])
    assert f"of all their variance it is {told}, layer by layer" in section


def test_the_tokens_of_heads_are_kept_and_reported(run_folder: Path, tokenizer, capsys):
    main(run_folder, settings(sequences=16))
    said = capsys.readouterr().out
    results = json.loads((run_folder / "eval/tokens/results.json").read_text())
    for name, shares in results["explained"].items():
        assert f"the {name} explains, by layer: {' '.join(f'{share:.1%}' for share in shares)}" in said
    page = Page("", figures="f")
    section = tokens(RunRecord.read(run_folder), page)
    listed = [
        (layer, head, words["most"])
        for layer, heads in enumerate(results["layers"], start=1)
        for head, words in enumerate(heads, start=1)
    ]
    layer, head, most = next(row for row in listed if row[2])
    assert all(word["tokens"] >= 5 and word["surplus"] * word["tokens"] ** 0.5 >= 4 for word in most)
    first = f"“{most[0]['text'].replace(' ', '␣')}” {most[0]['surplus']:+.1f} ± {most[0]['tokens'] ** -0.5:.1f}"
    assert f"| {layer} | {head} | {first}" in section
    explained = page.charts["f/explained"].rows
    assert [row[1] for row in explained] == [100 * share for share in results["explained"]["word"]]
    assert len(page.charts["f/word_classes"].rows) == 2 * 2 * len(results["word_classes"])
    assert sum(results["word_class_tokens"]) == 16 * 16
    coloured = (run_folder / "eval/tokens/text.html").read_text()
    assert coloured.count('<p class="text">') == 2
    assert coloured.count('title="head ') + coloured.count('title="no head') == 2 * 16


def test_the_residual_stream_is_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    said = capsys.readouterr().out
    results = json.loads((run_folder / "eval/stream/results.json").read_text())
    page = Page("", figures="f")
    section = stream(RunRecord.read(run_folder), page)
    assert sum(group["tokens"] for group in results["groups"]) == 3 * 16
    assert results["groups"][0]["kept"][0] == pytest.approx(1)
    for number, layer in enumerate(results["layers"], start=1):
        longest = layer["longest"][0]
        assert f"{longest['medians']:.1f} medians: {longest['text']!r} at position {longest['position']}" in said
        assert f"| {number} | {layer['median']:.3g} | {layer['long_share']:.2%} | " in section
    assert [row[1] for row in page.charts["f/stream"].rows] == results["groups"][0]["update"]


def test_the_influence_is_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    assert "when one token before is swapped, over 12 swaps" in capsys.readouterr().out
    results = json.loads((run_folder / "eval/influence/results.json").read_text())
    assert results["distance_ends"] == [1, 2, 4, 8]
    page = Page("", figures="f")
    section = influence(RunRecord.read(run_folder), page)
    told = [f"{results['mean'][i][2]:.3g} ± {results['standard_error'][i][2]:.1g}" for i in (0, 1)]
    assert f"| 4 | {told[0]} | {told[1]} |" in section
    assert [row[1] for row in page.charts["f/influence"].rows] == results["mean"][0]


def test_coding_rates_are_those_of_all_kept_checkpoints(run_folder: Path, make_model, tokenizer, capsys):
    page = Page("", figures="f")
    main(run_folder, settings())
    first = json.loads((run_folder / "eval/coding_rate@2/results.json").read_text())
    assert [row["step"] for row in first["steps"]] == [100]
    coding_rates(RunRecord.read(run_folder), page)
    assert "f/coding_rate_steps" not in page.charts
    model = make_model(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.blocks[1].mixer.in_proj.weight.mul_(2)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    write_checkpoint(run_folder / "checkpoints" / "step_00000300", model.config, model.state_dict(), tokenizer)
    weights = next((run_folder / "checkpoints" / "step_00000300").glob("model*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    main(run_folder, settings())
    said = capsys.readouterr().out
    assert f"left out: {weights}: damaged" in said
    results = json.loads((run_folder / "eval/coding_rate@2/results.json").read_text())
    assert [row["step"] for row in results["steps"]] == [100, 200]
    assert results["steps"][0] == first["steps"][0]
    assert results["steps"][1]["layers"] != first["steps"][0]["layers"]
    for step, own in zip(results["steps"][1]["layers"], results["layers"], strict=True):
        assert step == {name: own[name] for name in step}
    section = coding_rates(RunRecord.read(run_folder), page)
    assert "The same of 2 checkpoints" in section
    assert "Left out: " in section
    assert [row[0] for row in page.charts["f/coding_rate_steps"].rows] == [100, 200]
    gap = results["layers"][1]["variational"]["mean"] - results["layers"][1]["coding"]["mean"]
    assert page.charts["f/coding_rate_steps"].rows[1][-1] == pytest.approx(gap)


def test_subspaces_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    assert "effective rank" in capsys.readouterr().out
    layers = json.loads((run_folder / "eval/subspaces/results.json").read_text())["layers"]
    page = Page("", figures="f")
    section = subspaces(RunRecord.read(run_folder), page)
    assert page.charts["f/subspaces"].rows[1] == [1, 1, 2, layers[0]["overlap"][0][1]]
    for number, layer in enumerate(layers, start=1):
        assert 1 <= layer["mean"]["effective_rank"] <= layer["channels"] == 8
        assert f"| {number} | {layer['mean']['effective_rank']:.1f} of 8 | " in section
        assert f" | {layer['spanned']} | {layer['outside']:.2%} |" in section


def test_losses_without_parts_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    said = capsys.readouterr().out
    page = Page("", figures="f")
    section = swaps(RunRecord.read(run_folder), page)
    as_it_is, *others = json.loads((run_folder / "eval/swaps@2/results.json").read_text())["losses"]
    assert (as_it_is["name"], as_it_is["change"]) == ("as it is", 0)
    assert [loss["name"] for loss in others] == ["uniform", "by position", "constant moments"]
    for loss in others:
        assert loss["nats_per_token"] == pytest.approx(as_it_is["nats_per_token"] + loss["change"])
        change = f"{loss['change']:+.4f} ± {loss['standard_error']:.4f}"
        assert f"| {loss['name']} | {loss['nats_per_token']:.4f} | {change} |" in section
        assert f"{loss['nats_per_token']:.4f}  ({change})" in said
    assert [row[2] for row in page.charts["f/swaps"].rows] == [0, *[loss["change"] for loss in others]]


def test_coding_rates_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    assert "TSSA layer 2    R_c " in capsys.readouterr().out
    rates = json.loads((run_folder / "eval/coding_rate@2/results.json").read_text())
    assert rates["position_ends"] == [8, 16]
    assert len(rates["layers"]) == 2
    page = Page("", figures="f")
    section = coding_rates(RunRecord.read(run_folder), page)
    for number, found in enumerate(rates["layers"], start=1):
        assert found["coding"]["mean"] <= found["variational"]["mean"]
        assert found["coding_by_prefix"]["mean"][-1] == found["coding"]["mean"]
        change = found["variational_change"]
        assert f" | {change['mean']:+.4f} ± {change['standard_error']:.4f} | " in section
        assert f"\n| {number} | {found['coding']['mean']:.3f} ± " in section
    assert page.charts["f/coding_rate"].rows[1][1] == rates["layers"][1]["coding_change"]["mean"]
    prefixes = page.charts["f/coding_rate_prefixes"].rows
    assert [row[0] for row in prefixes] == [8, 16]
    assert prefixes[1][1:] == [
        layer[key]["mean"] for key in ("variational", "variational_change") for layer in rates["layers"]
    ]
    (run_folder / "eval/memberships@3/results.json").unlink()
    main(run_folder, settings())
    assert capsys.readouterr().out.startswith("reusing ")
    assert (run_folder / "eval/memberships@3/results.json").is_file()
    main(run_folder, settings(sequences=1))
    assert " ± " not in coding_rates(RunRecord.read(run_folder), page).split("\n| 1 |")[1].split("\n")[0]


def test_an_export_has_its_own_results_and_report(run_folder: Path, tmp_path: Path, shards, capsys):
    export = tmp_path / "export"
    shutil.copytree(run_folder / "checkpoints" / "step_00000100", export)
    with pytest.raises(ConfigError, match=r"names no text; give heldout\.shards=FOLDER$"):
        main(export, settings())
    main(export, settings().model_copy(update={"heldout": TextConfig(shards=str(shards.folder))}))
    rates = json.loads((export / "eval/coding_rate@2/results.json").read_text())
    assert rates["steps"] == []
    write_report(export)
    report = (export / "report.md").read_text()
    assert report.startswith("# Export export\n")
    assert f"`python -m eval.zero_shot {export} heldout.shards=FOLDER`" in report
    assert "## Coding rates (coding\\_rate@2)" in report
    assert (export / "eval/report/influence.pdf").read_bytes().startswith(b"%PDF")
    main(run_folder, settings())
    own = json.loads((run_folder / "eval/coding_rate@2/results.json").read_text())
    assert rates["layers"] == own["layers"]
    with pytest.raises(ConfigError, match="not a run folder but a checkpoint"):
        write_report(run_folder / "checkpoints" / "step_00000100")


def test_a_model_without_a_limit_reads_past_what_it_was_trained_on(run_folder: Path, make_model, tokenizer, capsys):
    model = make_model("TA", vocab_size=tokenizer.vocab_size, positions="none", denom_bias="head")
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    main(run_folder, settings())
    assert "not after" not in capsys.readouterr().out
    results = results_of(run_folder)
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7, 8, 50]
    assert len(results["concentration_by_position"]) == 1


def test_a_model_that_reads_one_token_is_refused(run_folder: Path, make_model, tokenizer):
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=1)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=r"reads one token \(model\.max_positions\)"):
        main(run_folder, settings())


@pytest.mark.parametrize("model", [{"pattern": "A"}, {"heads": 1}])
def test_a_model_whose_heads_share_nothing_out_is_refused(run_folder: Path, make_model, tokenizer, model):
    model = make_model(vocab_size=tokenizer.vocab_size, **model)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=f"^{run_folder}: has no layer in which heads share tokens out"):
        main(run_folder, settings())


@pytest.mark.parametrize("amounts", [[0, 5], [5, 5], [7, 5]])
def test_amounts_rise(amounts: list[int]):
    with pytest.raises(ConfigError, match=r"memberships\.context_tokens: .* must be above 0 and rise"):
        settings(context_tokens=amounts)
