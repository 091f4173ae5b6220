"""The operations that `benchmarks.launches` counts are those that the plan takes, whatever the documents."""

from typing import Any

import pytest
import torch
from fla_core import fla_core

from benchmarks.launches import PASSES, SMALL, count, count_compiled
from tost_lm.config import validate
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.spec import Load
from tost_lm.model import ModelConfig
from tost_lm.pretrain.plan.estimate import BLOCK_LAUNCHES, COMPILED_BLOCK_LAUNCHES, MODEL_LAUNCHES, PRODUCTS
from tost_lm.torch_internals import missing_compiler


@pytest.mark.parametrize(
    ("letter", "settings"), [*((letter, {}) for letter in "TDA"), ("A", {"softmax": {"conv": True}})]
)
def test_a_layer_launches_what_the_plan_takes(letter: str, settings: dict[str, Any]):
    if letter == "D" or settings:
        fla_core()
    few, many = (count(letter, 4, 64, documents, settings) for documents in (4, 40))
    together = few["forward"] + few["backward"]
    assert together == many["forward"] + many["backward"]
    shape = validate(ModelConfig, {"layers": 1, "pattern": letter, **SMALL, **settings}, "test").shape_of(letter)
    assert together == SPECS[letter].costs(Load(shape, 2, False, 256, 256, 256, 1, 1, True)).launches


def test_a_softmax_layer_is_one_call_for_all_documents():
    layer, model = count("A", 16, 64, 100), count("gpt2-base", 16, 64, 100)
    assert layer["forward"] <= 20, layer
    assert layer["backward"] <= 30, layer
    assert layer["forward_operations"]["aten::_flash_attention_forward"] == 1
    assert model["forward_operations"]["aten::_flash_attention_forward"] == 12


def test_a_block_around_its_mixer():
    model, layer = count("tost-base", 4, 64, 4), count("T", 4, 64, 4)
    around = sum(model[key] - 12 * layer[key] for key in ("forward", "backward"))
    assert around == 12 * BLOCK_LAUNCHES + MODEL_LAUNCHES


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler(torch.device("cpu"))), reason="torch.compile needs a C++ compiler")
def test_a_compiled_block_has_few_kernels():
    """Forward and backward; norms, residuals, LayerScale and casts are in few generated kernels."""
    block = count_compiled("T")
    passes = [block[one] for one in PASSES]
    assert [one["products"] for one in passes] == [4, 8]
    assert sum(one["generated"] for one in passes) + PRODUCTS <= COMPILED_BLOCK_LAUNCHES  # 1 fewer than for few tokens


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler(torch.device("cpu"))), reason="torch.compile needs a C++ compiler")
def test_each_gradient_of_a_split_is_written_by_its_own_kernel():
    """Of queries and keys; of what is convolved, gates, strengths and decays; of gate and up. Values have none: the
    convolution of values is an output of its own."""
    passes = [count_compiled("D")[one] for one in PASSES]
    assert passes[1]["generated"] == 15
    assert sum(one["bytes_per_channel"] for one in passes) < 175
