"""The spec of each mixer against what is counted of its layer."""

from typing import Any

import pytest
import torch

from tost_lm.config import validate
from tost_lm.mixers import counted
from tost_lm.mixers.counted import is_launched
from tost_lm.mixers.delta import chunked, groups, settings
from tost_lm.mixers.delta import spec as delta_spec
from tost_lm.mixers.delta.settings import DeltaSizes
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.spec import Load, MixerSpec
from tost_lm.model import ModelConfig
from tost_lm.torch_internals import TorchDispatchMode

SETTINGS: list[dict[str, Any]] = [
    {},
    {"bias": True, "tssa": {"denom_bias": "head"}, "softmax": {"kv_heads": 2, "qk_norm": True}},
    {"softmax": {"kv_heads": 2, "qk_norm": "all-heads", "head_size": 6, "gate": True}},
    {"delta": {"qk_heads": 4, "value_heads": 8, "qk_size": 3, "value_size": 5}},
    {"delta": {"value_size": 5, "decay_per_channel": True}},
    {"tssa": {"denom_bias": "none"}, "softmax": {"window": 4, "rope_theta": 0.0}},
    {"softmax": {"conv": True, "kv_heads": 2, "gate": True, "qk_norm": True}},
    {"softmax": {"conv": True, "window": 4}},
]


def spec_and_shape(letter: str, settings: dict[str, Any]) -> tuple[MixerSpec, Any]:
    sizes = {"layers": 1, "heads": 4, "width": 32, "vocab_size": 8, "max_positions": 1024}
    return validate(ModelConfig, {**sizes, "pattern": letter, **settings}, "test").mixers[0]


def load(shape: Any, tokens: int, ranks: int) -> Load:
    return Load(shape, 4, True, tokens, ranks * tokens, ranks * tokens, ranks, 1, ranks <= 16)


@pytest.mark.quick
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("letter", SPECS)
def test_numbers_are_those_of_the_layer(letter: str, settings: dict[str, Any]):
    spec, shape = spec_and_shape(letter, settings)
    assert spec.numbers(shape) == counted.numbers(spec, shape)


@pytest.mark.parametrize("ranks", [1, 4, 20])
@pytest.mark.parametrize(("letter", "settings"), [
    ("T", {}), ("T", SETTINGS[5]), ("A", SETTINGS[1]), ("A", SETTINGS[2]), ("A", SETTINGS[5]),
    ("A", SETTINGS[6]), ("A", SETTINGS[7]), ("D", SETTINGS[3]), ("D", SETTINGS[4]),
])  # fmt: skip
def test_bytes_are_those_that_the_layer_stores_and_sends(letter: str, settings: dict[str, Any], ranks: int):
    spec, shape = spec_and_shape(letter, settings)
    stated, found = (costs(load(shape, 40, ranks)) for costs in (spec.costs, lambda load: counted.costs(spec, load)))
    assert stated.state == found.state
    if ranks > 1:
        assert stated.exchanges == found.exchanges or not sum(stated.exchanged + stated.grouped)
        for name in ("exchanged", "grouped", "summed", "dealt"):
            assert getattr(stated, name) == getattr(found, name), name
        assert letter == "T" or stated.received == pytest.approx(found.received)
    elif letter != "D":  # which looks for broken numbers, and finds no numbers
        log_sums = 4 * shape.heads if letter == "A" and shape.own.window else 0  # which a CPU does not store in windows
        assert stated.stored == pytest.approx(found.stored + log_sums)


def test_a_loop_over_chunks_is_counted_for_few_tokens(monkeypatch: pytest.MonkeyPatch):
    spec, shape = spec_and_shape("D", {})
    whole = counted.costs(spec, load(shape, 512, 1)), counted.flops(spec, shape, 512)
    monkeypatch.setattr(counted, "LOOPS", 1.0)  # from now on, any loop counts
    few = counted.costs(spec, load(shape, 512, 1)), counted.flops(spec, shape, 512)
    assert few[0].launches == whole[0].launches
    assert few[0].stored == pytest.approx(whole[0].stored)
    assert few[1] == whole[1]


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_launched(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_launches_of_maps_are_those_of_chunks_and_groups(on_cpu: bool, monkeypatch: pytest.MonkeyPatch):
    """On a device, 16 pieces of 9 chunks."""
    if not on_cpu:
        monkeypatch.setattr(settings, "DEVICE_GROUP_ELEMENTS", 4 * 128 * 1024)
        for module, name in ((groups, "GROUP_ELEMENTS"), (delta_spec, "DEVICE_GROUP_ELEMENTS")):
            monkeypatch.setattr(module, name, 4 * 128 * 1024)
        monkeypatch.setattr(
            chunked, "pieces_of", lambda *sizes: groups.pieces_of(sizes[0], sizes[1], torch.device("cuda"))
        )
    tokens, (spec, shape) = 4500, spec_and_shape("D", {})
    h, H, K, V = DeltaSizes.of(shape)
    sizes = (h, K), (H, V), (H,), (H,)
    key, value, log_decay, beta = (torch.rand(tokens, *size, requires_grad=True) for size in sizes)
    with Launches() as forward:
        factor, added = chunked.delta_rule_maps(key, value, log_decay, beta, [tokens])
    with Launches() as backward:
        torch.autograd.backward([factor, added], [factor.detach(), added.detach()])
    stated = spec.costs(load(shape, tokens, 2)._replace(on_cpu=on_cpu)).launches_of_maps
    assert stated == pytest.approx((forward.count, backward.count), rel=0.1)
