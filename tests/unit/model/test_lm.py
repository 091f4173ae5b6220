"""Presets, initial weights, and what the model refuses."""

import pytest
import torch

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.parallel.settings import obstacle_to_tensor_ranks

pytestmark = pytest.mark.quick


def config(**settings) -> ModelConfig:
    small = {"layers": 2, "heads": 4, "width": 32, "vocab_size": 50, "max_positions": 16, "layer_scale": 1.0}
    return validate(ModelConfig, {**small, **settings}, "test")


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("tost-base", 109.60), ("tost-medium", 303.66), ("tost-large", 655.14), ("gpt2-base", 123.59),
        ("gpt2-base-layerscale", 123.61), ("delta-350m", 376.13), ("delta-1b", 1079.61), ("delta-3b", 3181.44),
    ],
)  # fmt: skip
def test_presets_have_the_published_parameter_counts_and_ours_are_near(preset: str, millions: float):
    with torch.device("meta"):
        model = TostLM(validate(ModelConfig, {"preset": preset}, "test"))
    assert round(model.parameter_count() / 1e6, 2) == millions


@pytest.mark.parametrize(("width", "hidden"), [(16, 256), (96, 256), (97, 512), (768, 2048), (2048, 5632)])
def test_hidden_channels_of_a_swiglu(width: int, hidden: int):
    assert config(width=width, heads=1, mlp="swiglu").mlp_width == hidden


def test_a_factor_alone_is_llama_3s_as_in_version_0_1():
    assert config(pattern="A", softmax={"rope_scaling_factor": 8.0}).rotary == (8, 1e4, "llama3", 8.0, 8192)


@pytest.mark.parametrize("init_std", [0.02, 0.05])
def test_weights_are_drawn_as_published(init_std: float):
    torch.manual_seed(0)
    settings = {"layers": 8, "heads": 4, "width": 256, "vocab_size": 1000, "layer_scale": 1e-5, "tied_head": False}
    model = TostLM(config(**settings, init_std=init_std))
    for name, p in model.named_parameters():
        end = name.rsplit(".", 2)[-2:]
        if end[-1] == "gamma":
            assert (p == 1e-5).all()
        elif end[-1] == "temp" or end[0].endswith("norm"):
            assert (p == 1).all()
        elif end[-1] == "denom_bias":
            assert (p == 0).all()
        else:
            std = init_std / 16**0.5 if end[0] == "out_proj" else init_std
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 0.05 * std + 3e-4, name


def test_z_loss_is_a_part_of_the_loss_in_training_only():
    model, tokens = TostLM(config()).double(), torch.arange(12).view(2, 6)
    model.z_loss = 0.5
    labels = tokens.clone()
    labels[:, ::2] = -100
    trained = model(tokens, labels)
    with torch.no_grad():
        measured = model(tokens, labels)
    z_loss, loss = trained.scalars["z_loss"], trained.scalars["loss"]
    torch.testing.assert_close(z_loss, 0.5 * trained.logits[:, 1::2].logsumexp(-1).square().mean().detach())
    torch.testing.assert_close(trained.loss.detach(), loss + z_loss)
    torch.testing.assert_close(measured.loss, loss)
    assert (measured.scalars["z_loss"], measured.loss) == (0, measured.nats.sum() / 6)


def test_more_tokens_than_positions_are_refused():
    model = TostLM(config())
    state = model(torch.zeros(1, 10, dtype=torch.int64)).state
    with pytest.raises(ConfigError, match=r"17 tokens .*model\.max_positions = 16"):
        model(torch.zeros(1, 7, dtype=torch.int64), state=state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "TXA"}, r"invalid model\.pattern: 'TXA'; use the letters T \(TSSA\), D .* and A"),
        ({"pattern": "ta"}, r"invalid model\.pattern: 'ta'; use"),
        ({"pattern": ""}, r"invalid model\.pattern: ''; use"),
        ({"layers": 300_000}, r"layers: input should be less than or equal to 10000"),
        ({"pattern": "2T:1A"}, r"not a multiple of the 3 letters of model\.pattern 'TTA'"),
        ({"pattern": "0T:1A"}, r"invalid model\.pattern: '0T:1A'; use .* as a ratio such as 3D:1A"),
        ({"pattern": "TTA"}, r"model\.layers 2 is not a multiple of the 3 letters of model\.pattern 'TTA'"),
        ({"pattern": "A", "softmax": {"rope_scaling": "yarn"}}, r"original_length; set it to the trained context$"),
        ({"pattern": "A", "width": 36}, r"rotates pairs of channels, not 9 of a head; change model\.width"),
        (
            {"pattern": "A", "softmax": {"kv_heads": 3}},
            r"model\.heads 4 is not a multiple of model\.softmax\.kv_heads 3",
        ),
        ({"norm_after": "AB"}, r"model\.norm_after 'AB': no mixer has the letter B; leave it out"),
        ({"mixer": "tssa"}, r"mixer: unknown key"),
        (
            {"tssa": {"denom_bias": "heads"}},
            r"tssa\.denom_bias: input should be 'position', 'head' or 'none'",
        ),
    ],
)
def test_what_makes_no_model_is_named(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        config(**settings)
    assert str(refused.value).count("\n") == 0


def test_what_tensor_ranks_cannot_split_is_named():
    assert obstacle_to_tensor_ranks(config(heads=3, width=12, mlp="swiglu"), 3) == (
        "the 256 hidden channels of model.mlp 'swiglu' are not divisible by parallel.tensor 3; choose a divisor of them"
    )
    assert obstacle_to_tensor_ranks(config(pattern="A", softmax={"qk_norm": "all-heads"}), 2) == (
        "tensor ranks cannot split softmax.qk_norm all-heads; set parallel.tensor=1 and use sequence ranks"
    )
