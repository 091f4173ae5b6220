"""Every setting of a public form against transformers: it has the same effect, or is refused."""

import copy
import dataclasses
import math
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import transformers
from test_public_forms import MODELS, VOCAB, build_ours, build_theirs, run_theirs
from torch import Tensor
from transformers.modeling_rope_utils import RopeParameters

from tost_lm.errors import CheckpointError, ConfigError

TEXT_BT = torch.arange(24).reshape(2, 12) * 5 % VOCAB
NOT_OF_THESE = ("_", "base_model_", "vision_", "text_config", "decoder", "generator", "quantization_config")
"""Names, or beginnings of names, of settings of other models, with which transformers computes nothing."""


class Change(NamedTuple):
    """A setting with an odd value."""

    name: str
    value: Any
    place: Literal["top", "table", "instead"] = "top"
    """`table`: in that of the rotary embedding; `instead`: at the top instead of there."""


def names_read_by_theirs(theirs: Any) -> list[str]:
    """The settings that the class declares, and those that transformers reads although no class declares them."""
    names = {field.name for field in dataclasses.fields(theirs.config)}
    usual = transformers.PreTrainedConfig.__getattribute__

    def reads(config: Any, name: str) -> Any:
        if "transformers" in sys._getframe(1).f_code.co_filename:
            names.add(name)
        return usual(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedConfig, "__getattribute__", reads)
        logits_of_theirs(type(theirs)(type(theirs.config)(**theirs.config.to_dict())))
    methods = {name for name in names if callable(getattr(theirs.config, name, None))}
    return sorted(name for name in names - methods if not name.startswith(NOT_OF_THESE))


def odd_values(value: Any, draw: random.Random) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [draw.randrange(2, 7), 2 * value, 0, -1]
    if isinstance(value, float):
        return [value * draw.uniform(0.1, 3), 0, -value, math.inf]
    if isinstance(value, str):
        return ["gelu"]
    if isinstance(value, list):
        return [value[:-1], value[::-1], ["full_attention"] * len(value), ["sliding_attention"] * len(value), []]
    return [False, draw.randrange(2, 7), ["reuse"] * 4]


def odd_changes(theirs: Any, draw: random.Random) -> Iterator[Change]:
    tree = theirs.config.to_dict()
    for name in names_read_by_theirs(theirs):
        for value in odd_values(tree.get(name), draw):
            yield Change(name, value)
    yield Change("per_layer_config", {"0": {"rms_norm_eps": draw.uniform(0, 1)}})
    odd = {
        "rope_type": ["linear", "dynamic", "yarn", "longrope", "llama3", "default"],
        "rope_theta": [0, 0.0, -5.0, None, 7, draw.uniform(2, 9), math.inf, math.nan, "x"],
        "partial_rotary_factor": [0, draw.choice([0.25, 0.5]), draw.uniform(0.2, 1), 1.0, 1.5, -0.5, None],
    }
    for name in [*RopeParameters.__annotations__, "type", "hidden_act", "full_attention"]:
        for value in odd.get(name, odd_values(tree["rope_parameters"].get(name), draw)):
            yield from (Change(name, value, place) for place in ("top", "table", "instead"))


def config_with(theirs: Any, changes: list[Change]) -> Any:
    tree = copy.deepcopy(theirs.config.to_dict())
    for name, value, place in changes:
        (tree["rope_parameters"] if place == "table" else tree)[name] = value
        if place == "instead":
            tree["rope_parameters"].pop(name, None)
    return type(theirs.config)(**tree)


def logits_of_theirs(theirs: Any) -> Tensor:
    """Of a text in one call, and in two."""
    first = theirs(TEXT_BT[:, :7], use_cache=True, return_dict=True)
    second = theirs(TEXT_BT[:, 7:], past_key_values=first.past_key_values, use_cache=True, return_dict=True)
    return torch.cat([theirs(TEXT_BT, return_dict=True).logits, first.logits, second.logits], 1)


def with_changes(theirs: Any, changes: list[Change]) -> tuple[Any, Tensor]:
    """A model of transformers with drawn weights, and its logits."""
    changed, draw = type(theirs)(config_with(theirs, changes)).double().eval(), torch.Generator().manual_seed(0)
    for weight in changed.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=draw, dtype=torch.float64)
    changed.tie_weights()
    changed.model.rotary_emb = changed.model.rotary_emb and type(changed.model.rotary_emb)(changed.config)
    return changed, logits_of_theirs(changed)


def differing(kind: str, theirs: Any, changes: list[Change]) -> list[Change]:
    """Those of the changes whose models have other logits than in transformers. All are made at once first."""
    built, ours = None, None
    with suppress(Exception):  # transformers refuses them
        built = with_changes(theirs, changes)
    with suppress(CheckpointError, ConfigError):
        ours = built and build_ours(kind, built[0])
    if built and ours:
        first = ours(TEXT_BT[:, :7])
        parts = [ours(TEXT_BT).logits, first.logits, ours(TEXT_BT[:, 7:], state=first.state).logits]
        if torch.allclose(torch.cat(parts, 1), built[1], rtol=1e-9, atol=1e-9, equal_nan=True):
            return []
    if len(changes) == 1:
        return changes if ours else []
    half = len(changes) // 2
    return differing(kind, theirs, changes[:half]) + differing(kind, theirs, changes[half:])


@pytest.mark.parametrize("kind", ["Llama 3", "Qwen3, YaRN", "Qwen3.5", "OLMo-Hybrid, rotary, grouped heads"])
@torch.no_grad()
def test_each_setting_has_its_effect_in_transformers_or_is_refused(kind: str):
    """Odd values are drawn for each. Settings that change nothing in ours are changed together."""
    form, theirs, where = MODELS[kind][0], build_theirs(kind), Path("config.json")
    before, alone, without_effect = form.our_settings(theirs.config, where), [], {}
    with run_theirs(kind, torch.float64):
        for change in odd_changes(theirs, random.Random(kind)):
            try:
                config = config_with(theirs, [change])
            except Exception:  # transformers refuses it
                continue
            with suppress(CheckpointError, ConfigError):
                if form.our_settings(config, where) == before:
                    without_effect.setdefault((change.name, change.place), []).append(change)
                else:
                    alone.append([change])
        together = [[*filter(None, changes)] for changes in zip_longest(*without_effect.values())]
        assert len(alone) > 15, "too few settings have an effect"
        assert len(together[0]) > 45, "too few settings are tested"
        assert [change for changes in alone + together for change in differing(kind, theirs, changes)] == []
