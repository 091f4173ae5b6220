"""Models that are made to read longer sequences: what stays to the bit, what is computed anew, and what is refused."""

import json
import re
import resource
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close

import tost_lm
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.config import ExtensionConfig
from tost_lm.pretrain.commands.extend import extend
from tost_lm.testing import assert_as_accurate

OLD, NEW = 1024, 8192
VOCAB = 50


class Tokenizer(NamedTuple):
    file_name: str
    model_bytes: bytes


TOKENIZER = Tokenizer("tokenizer.tiktoken", b"a tokenizer")


def write_model(folder: Path, trained: int = OLD, **settings: Any) -> TostLM:
    """A model with biases that its first `trained` positions have learned, and weights that let every part count."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "width": 8, "vocab_size": VOCAB, "max_positions": OLD, "layer_scale": 1.0,
             "context_length": trained}  # fmt: skip
    model = TostLM(validate(ModelConfig, {**sizes, **settings}, "test"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("denom_bias") and parameter.dim() == 2:
                parameter[:, :trained].normal_(std=0.1)
            elif parameter.dim() == 2:
                parameter.mul_(20)
    write_checkpoint(folder, model.config, model.state_dict(), TOKENIZER)
    return model


def settings(folder: Path, **how: Any) -> ExtensionConfig:
    return validate(ExtensionConfig, {"folder": str(folder), "max_positions": NEW, **how}, "test")


def extended(tmp_path: Path, **how: Any) -> TostLM:
    extend(tmp_path / "short", settings(tmp_path / "long", **how), TOKENIZER)
    return tost_lm.load(tmp_path / "long")


def tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", ["T", "TA", "TS"])
def test_what_is_kept_gives_the_same_loss_to_the_bit_and_then_reads_on(tmp_path: Path, pattern: str):
    old = write_model(tmp_path / "short", pattern=pattern)
    new = extended(tmp_path, positions="keep", denom_bias="keep")
    text = tokens(NEW)
    inputs, labels = text[:, :-1], text[:, 1:]
    before, after = (model(inputs[:, :OLD], labels=labels[:, :OLD]) for model in (old, new))
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(before.logits, after.logits)
    whole = new(inputs)
    assert_as_accurate(whole.logits[:, :OLD], before.logits, old.double()(inputs[:, :OLD]).logits)
    assert whole.logits.isfinite().all()
    with pytest.raises(ConfigError, match=rf"{NEW + 1} tokens are more .* \(model\.max_positions = {NEW}"):
        new(tokens(NEW))
    with pytest.raises(ConfigError, match=rf"{NEW + 1} tokens are more"):
        new(inputs[:, :1], state=whole.state)


def test_further_positions_have_the_mean_of_those_that_were_trained(tmp_path: Path):
    old = write_model(tmp_path / "short", trained=600).state_dict()
    new = extended(tmp_path, positions="keep", denom_bias="keep").state_dict()
    for name, before in old.items():
        after = new[name]
        if name == "positions.weight" or name.endswith("denom_bias"):
            before, after = (table if name == "positions.weight" else table.T for table in (before, after))
            assert len(after) == NEW
            assert_close(after[OLD:], before[:600].mean(0).expand(NEW - OLD, -1))
        assert torch.equal(after[: len(before)], before)


@pytest.mark.parametrize("length", [NEW, 1536])
def test_a_stretched_table_has_the_old_values_where_positions_coincide_and_lines_between(tmp_path: Path, length: int):
    old = write_model(tmp_path / "short")
    new = extended(tmp_path, positions="interpolate", denom_bias="interpolate", max_positions=length)
    bias = "blocks.0.mixer.denom_bias"
    pairs = [
        (old.state_dict()["positions.weight"], new.state_dict()["positions.weight"]),
        (old.state_dict()[bias].T, new.state_dict()[bias].T),
    ]
    for before, after in pairs:
        assert after.shape == (length, before.shape[1])
        hits = [p for p in range(length) if p * OLD % length == 0]
        assert len(hits) == OLD // (1 if length == NEW else 2)
        assert torch.equal(after[hits], before[[p * OLD // length for p in hits]])
        for p in (1, length // 2 + 1, length - length // OLD - 2):
            place, left = p * OLD / length, p * OLD // length
            assert_close(after[p], before[left] + (place - left) * (before[left + 1] - before[left]))
        assert torch.equal(after[-1], before[-1])


def test_tables_that_are_dropped(tmp_path: Path):
    old = write_model(tmp_path / "short", trained=600)
    inputs = tokens(NEW)
    with pytest.raises(ConfigError, match="more than the model's positions"):
        old(inputs)
    assert extended(tmp_path, positions="sinusoidal", denom_bias="none")(inputs).logits.isfinite().all()
    write_model(tmp_path / "a/short", trained=600)
    new = extended(tmp_path / "a", positions="none", denom_bias="head")
    assert (new.config.positions, new.config.tssa.denom_bias, new.config.position_limit) == ("none", "head", None)
    assert new(inputs).logits.isfinite().all()
    for name, weight in new.state_dict().items():
        if name.endswith("denom_bias"):  # the positions behind 600 have learned nothing
            assert_close(weight, old.state_dict()[name][:, :600].mean(1))


def test_a_heads_mean_moves_scores_less_than_any_other_number(tmp_path: Path):
    old = write_model(tmp_path / "short")
    bias, mean = (
        model.state_dict()["blocks.0.mixer.denom_bias"]
        for model in (old, extended(tmp_path, positions="none", denom_bias="head"))
    )

    def change(number: torch.Tensor) -> float:
        """The sum of the scores' differences between heads, summed over positions."""
        moved = (number[:, None] - bias).double()
        return (moved - moved.mean(0)).square().sum().item()

    generator = torch.Generator().manual_seed(0)
    others = [mean + 0.01 * torch.randn(mean.shape, generator=generator) for _ in range(20)]
    assert change(mean) < min(map(change, [*others, bias.median(1).values, bias[:, -1]]))


def test_settings_without_a_table_need_no_choice(tmp_path: Path):
    old = write_model(tmp_path / "short", positions="sinusoidal", tssa={"denom_bias": "head"}, pattern="TA")
    new = extended(tmp_path, max_positions=None, rope_theta=500000.0)
    softmax = old.config.softmax.model_copy(update={"rope_theta": 500000.0})
    assert new.config == old.config.model_copy(update={"softmax": softmax})
    assert all(torch.equal(weight, new.state_dict()[name]) for name, weight in old.state_dict().items())
    write_model(tmp_path / "b/short", pattern="A", positions="learned", softmax={"rope_theta": 0.0})
    assert extended(tmp_path / "b", positions="keep", denom_bias="keep").config.max_positions == NEW


@pytest.mark.parametrize(
    ("model", "how", "problems"),
    [
        (
            {},
            {},
            [
                r"extend\.positions: must be set, because the model has .* 1024 positions; choose keep \(.*\); "
                r"interpolate \(.* 1024 / 8192\); sinusoidal \(.*\); none \(.*\)\. The logits .* only with keep",
                r"extend\.denom_bias: must be set, .*; choose keep \(.*\); interpolate .*; head \(.*\); none \(.*\)\.",
            ],
        ),
        (
            {"positions": "none", "tssa": {"denom_bias": "head"}},
            {"positions": "sinusoidal", "denom_bias": "head"},
            [
                r"extend\.max_positions 8192: the model has no learned table of positions and .*; leave it out",
                r"extend\.positions sinusoidal: model\.positions is 'none', so there is nothing to change; leave",
                r"extend\.denom_bias head: model\.tssa\.denom_bias is 'head', so there is nothing to change; leave it",
            ],
        ),
        (
            {"positions": "none", "tssa": {"denom_bias": "head"}},
            {"max_positions": None},
            [r"nothing to extend: the model reads sequences of any length; set train\.seq_len"],
        ),
        (
            {},
            {"positions": "keep", "denom_bias": "keep", "max_positions": None},
            [r"extend\.max_positions: must be set, to more than the model's 1024"],
        ),
        (
            {"pattern": "A"},
            {"positions": "keep", "denom_bias": "none"},
            [r"extend\.denom_bias none: the model has no T layers, so there is nothing to change"],
        ),
        (
            {},
            {"positions": "keep", "denom_bias": "keep", "max_positions": 1024, "rope_theta": 1e6},
            [
                r"extend\.max_positions 1024 is not more than the model's 1024; give more",
                r"extend\.rope_theta 1e\+06: the model has no rotary embedding; leave it out",
            ],
        ),
    ],
)
def test_what_is_to_be_decided_or_has_nothing_to_change_is_refused(
    tmp_path: Path, model: dict, how: dict, problems: list[str]
):
    write_model(tmp_path / "short", **model)
    with pytest.raises(ConfigError) as error:
        extended(tmp_path, **how)
    for line, problem in zip(str(error.value).splitlines(), problems, strict=True):
        assert re.match(problem, line), line
    assert not (tmp_path / "long").exists()


def test_a_folder_is_made_once_and_never_overwritten(tmp_path: Path):
    write_model(tmp_path / "short", trained=600)
    how = settings(tmp_path / "long", positions="keep", denom_bias="keep")
    said = extend(tmp_path / "short", how, TOKENIZER)
    assert "only the first 600 of 1,024 positions were trained" in said[1]
    assert said[-2].endswith("first 1,024 positions are bitwise identical")
    assert said[-1].endswith(f"train.initial_weights={tmp_path / 'long'} model.max_positions=8192")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "long").iterdir()}
    assert extend(tmp_path / "short", how, TOKENIZER)[0].startswith(f"reusing {tmp_path / 'long'}")
    assert json.loads((tmp_path / "long/extension.json").read_text())["source"] == str(tmp_path / "short")

    other = how.model_copy(update={"denom_bias": "head"})
    with pytest.raises(ConfigError, match="exists and is not the result of this extension; give another"):
        extend(tmp_path / "short", other, TOKENIZER)
    with pytest.raises(ConfigError, match="exists and is not"):
        extend(tmp_path / "short", how.model_copy(update={"folder": tmp_path / "short"}), TOKENIZER)
    write_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="exists and is not"):
        extend(tmp_path / "other", how, TOKENIZER)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "long").iterdir()} == before
    (tmp_path / "long/model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.json: damaged, .*; delete the checkpoint"):
        extend(tmp_path / "short", how, TOKENIZER)


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path):
    write_model(tmp_path / "short")
    how = settings(tmp_path / "long", positions="keep", denom_bias="keep")
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="long: cannot be written: File too large"):
            extend(tmp_path / "short", how, TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before
    nowhere = how.model_copy(update={"folder": tmp_path / "short/model.json/long"})
    with pytest.raises(CheckpointError, match="long: cannot be written: Not a directory"):
        extend(tmp_path / "short", nowhere, TOKENIZER)
