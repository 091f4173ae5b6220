"""eval.analyze: what it prints and keeps, and what it refuses."""

import json
from pathlib import Path

import pytest

from eval.analyze import main
from tost_lm.analysis.memberships import read_text
from tost_lm.config import validate
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.config import AnalyzeConfig
from tost_lm.evaluation.report.coding_rate import coding_rates
from tost_lm.evaluation.report.memberships import memberships_of_run
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.evaluation.report.subspaces import subspaces
from tost_lm.evaluation.report.swaps import swaps
from tost_lm.model.checkpoint import write_checkpoint


def settings(**memberships) -> AnalyzeConfig:
    few = {"sequences": 3, "probe_tokens": 9, "context_tokens": [5, 7, 8, 50]}
    return validate(AnalyzeConfig, {"memberships": {**few, **memberships}}, "test")


def results_of(run: Path) -> dict:
    return json.loads((run / "eval/memberships@2/results.json").read_text())


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
    section = memberships_of_run(RunRecord.read(run_folder))
    assert "Of `step_00000100`" in section
    layer, other = results["after_context"][2]["moved"]
    assert f"| 7 | {results['after_context'][2]['nats_per_token']:.4f} | {layer:.3f} | {other:.3f} |" in section
    layer, other = results["concentration_by_position"]
    told = ", ".join(f"{share:.1%}" for share in results["explained_by_position"])
    assert f"their position alone explains {told}, layer by layer." in section
    assert f"| 16 | {layer[1]:.3f} | {other[1]:.3f} |" in section


def test_subspaces_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    assert "effective rank" in capsys.readouterr().out
    layers = json.loads((run_folder / "eval/subspaces/results.json").read_text())["layers"]
    section = subspaces(RunRecord.read(run_folder))
    for number, layer in enumerate(layers, start=1):
        assert 1 <= layer["mean"]["effective_rank"] <= layer["channels"] == 8
        assert f"| {number} | {layer['mean']['effective_rank']:.1f} of 8 | " in section
        assert f" | {layer['spanned']} | {layer['outside']:.2%} |" in section


def test_losses_without_parts_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    said = capsys.readouterr().out
    section = swaps(RunRecord.read(run_folder))
    as_it_is, *others = json.loads((run_folder / "eval/swaps/results.json").read_text())["losses"]
    assert (as_it_is["name"], as_it_is["change"]) == ("as it is", 0)
    assert [loss["name"] for loss in others] == ["uniform", "by position", "constant moments"]
    for loss in others:
        assert loss["nats_per_token"] == pytest.approx(as_it_is["nats_per_token"] + loss["change"])
        change = f"{loss['change']:+.4f} ± {loss['standard_error']:.4f}"
        assert f"| {loss['name']} | {loss['nats_per_token']:.4f} | {change} |" in section
        assert f"{loss['nats_per_token']:.4f}  ({change})" in said


def test_coding_rates_are_kept_and_reported(run_folder: Path, capsys):
    main(run_folder, settings())
    assert "TSSA layer 2    R_c " in capsys.readouterr().out
    rates = json.loads((run_folder / "eval/coding_rate/results.json").read_text())
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
    (run_folder / "eval/memberships@2/results.json").unlink()
    main(run_folder, settings())
    assert capsys.readouterr().out.startswith("reusing ")
    assert (run_folder / "eval/memberships@2/results.json").is_file()
    main(run_folder, settings(sequences=1))
    assert " ± " not in coding_rates(RunRecord.read(run_folder), page).split("\n| 1 |")[1].split("\n")[0]


def test_a_model_without_a_limit_reads_past_what_it_was_trained_on(run_folder: Path, make_model, tokenizer, capsys):
    model = make_model("TA", vocab_size=tokenizer.vocab_size, positions="none", denom_bias="head")
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    main(run_folder, settings())
    assert "not after" not in capsys.readouterr().out
    results = results_of(run_folder)
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7, 8, 50]
    assert len(results["concentration_by_position"]) == 1


@pytest.mark.parametrize("model", [{"pattern": "A"}, {"heads": 1}])
def test_a_model_whose_heads_share_nothing_out_is_refused(run_folder: Path, make_model, tokenizer, model):
    model = make_model(vocab_size=tokenizer.vocab_size, **model)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=f"^{run_folder}: has no layer in which heads share tokens out"):
        main(run_folder, settings())


def test_the_text_is_held_out_text_after_the_context(shards: Shards):
    text = [token for array in shards.token_arrays("valid") for token in array.tolist()]
    sequences_NT, context_S = read_text(shards, 4, 10, 20)
    assert context_S.tolist() == text[:20]
    assert sequences_NT[0].tolist() == text[20:30]
    assert sequences_NT[-1].tolist() == text[-10:]
    assert sequences_NT.shape == (4, 10)
    with pytest.raises(DataError, match=rf"held-out text has {len(text):,} tokens.*lower memberships.context_tokens"):
        read_text(shards, 4, 10, len(text) - 39)


@pytest.mark.parametrize("amounts", [[0, 5], [5, 5], [7, 5]])
def test_amounts_rise(amounts: list[int]):
    with pytest.raises(ConfigError, match=r"memberships\.context_tokens: .* must be above 0 and rise"):
        settings(context_tokens=amounts)
