"""The released code's checkpoints: the logits that it computes itself, back again, and files that are refused."""

import os
import pickle
import re
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm
from torch.testing import assert_close

from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.interop.authors import read_authors, to_authors, write_authors
from tost_lm.model import ModelConfig, TostLM

LAYERS, HEADS, WIDTH, BLOCK, VOCAB = 2, 2, 8, 12, 40


def their_weights(kind: str = "T", bias: bool = False) -> dict[str, Tensor]:
    """Weights as their model names and shapes them, of a size that lets every part show."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, mean: float = 0.0, std: float = 0.5) -> Tensor:
        return mean + std * torch.randn(shape, generator=generator)

    weights = {"wte.weight": draw(VOCAB, WIDTH), "wpe.weight": draw(BLOCK, WIDTH)}
    norms, linears = {"ln_f": WIDTH}, {}
    for layer in range(LAYERS):
        block = f"h.{layer}"
        norms |= {f"{block}.ln_1": WIDTH, f"{block}.ln_2": WIDTH}
        linears |= {
            f"{block}.attn.c_attn": (WIDTH if kind == "T" else 3 * WIDTH, WIDTH),
            f"{block}.attn.c_proj": (WIDTH, WIDTH),
            f"{block}.mlp.c_fc": (4 * WIDTH, WIDTH),
            f"{block}.mlp.c_proj": (WIDTH, 4 * WIDTH),
        }
        if kind == "T":
            weights |= {
                f"{block}.attn.temp": draw(HEADS, 1, mean=1.0),
                f"{block}.attn.denom_bias": draw(HEADS, BLOCK, 1),
                f"{block}.gamma1": draw(WIDTH, mean=1.0),
                f"{block}.gamma2": draw(WIDTH, mean=1.0),
            }
    weights |= {f"{name}.weight": draw(width, mean=1.0) for name, width in norms.items()}
    weights |= {f"{name}.weight": draw(*shape) for name, shape in linears.items()}
    if bias:
        weights |= {f"{name}.bias": draw(width) for name, width in norms.items()}
        weights |= {f"{name}.bias": draw(shape[0]) for name, shape in linears.items()}
    named = {f"transformer.{name}": weight for name, weight in weights.items()}
    return named | {"lm_head.weight": named["transformer.wte.weight"]}


def their_logits(w: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """What the released code computes, from the formulas of arXiv 2412.17810 and of GPT-2."""
    batch, length = tokens_BT.shape

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (WIDTH,), w[f"transformer.{name}.weight"], w.get(f"transformer.{name}.bias"), 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"transformer.{name}.weight"].T + w.get(f"transformer.{name}.bias", 0)

    def by_head(x: Tensor) -> Tensor:
        return x.view(batch, length, HEADS, -1).transpose(1, 2)

    def token_statistics(x: Tensor, block: str) -> Tensor:
        projected = by_head(linear(x, f"{block}.attn.c_attn"))
        energy = projected**2
        share = energy / energy.cumsum(2).clamp(min=1e-12)
        bias, temp = w[f"transformer.{block}.attn.denom_bias"], w[f"transformer.{block}.attn.temp"]
        membership = (temp * (share + bias[:, :length]).sum(-1)).softmax(1)[..., None]
        spread = (membership * energy).cumsum(2) / (membership.cumsum(2) + 1e-8)
        mixed = -projected * membership / (1 + spread)
        return linear(mixed.transpose(1, 2).reshape(batch, length, WIDTH), f"{block}.attn.c_proj")

    def attention(x: Tensor, block: str) -> Tensor:
        q, k, v = (by_head(part) for part in linear(x, f"{block}.attn.c_attn").split(WIDTH, 2))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3) / (WIDTH / HEADS) ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
        return linear((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH), f"{block}.attn.c_proj")

    mixer = token_statistics if "transformer.h.0.attn.temp" in w else attention
    x = w["transformer.wte.weight"][tokens_BT] + w["transformer.wpe.weight"][:length]
    for layer in range(LAYERS):
        block = f"h.{layer}"
        x = x + w.get(f"transformer.{block}.gamma1", 1) * mixer(norm(x, f"{block}.ln_1"), block)
        hidden = gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + w.get(f"transformer.{block}.gamma2", 1) * linear(hidden, f"{block}.mlp.c_proj")
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def write_theirs(path: Path, weights: dict[str, Any], **arguments: Any) -> Path:
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK, "vocab_size": VOCAB}
    torch.save(
        {
            "model": weights,
            "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
            "model_args": {**sizes, "bias": False, "dropout": 0.1, **arguments},
            "iter_num": 600000,
            "best_val_loss": torch.tensor(2.75),
            "config": {"dataset": "openwebtext", "compile": True},
        },
        path,
    )
    return path


def model_of(config: ModelConfig, weights: dict[str, Tensor]) -> TostLM:
    model = TostLM(config)
    model.load_state_dict(weights)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (3, BLOCK), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["T", "A"])
def test_logits_are_those_of_the_released_code_and_the_way_back_is_exact(tmp_path: Path, kind: str, bias: bool):
    theirs = their_weights(kind, bias)
    found = read_authors(write_theirs(tmp_path / "ckpt.pt", theirs, bias=bias))
    assert (found.config.pattern, found.config.bias, found.config.layer_scale > 0) == (kind, bias, kind == "T")
    assert (found.iterations, found.best_nats) == (600000, 2.75)
    with torch.no_grad():
        logits = model_of(found.config, found.weights)(tokens()).logits
    assert logits.std() > 0.5
    assert_close(logits, their_logits(theirs, tokens()), rtol=0, atol=1e-5)

    back = to_authors(found.config, found.weights, iterations=7)
    assert back["iter_num"] == 7
    assert back["model_args"] == {
        "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK, "vocab_size": VOCAB, "bias": bias,
        "dropout": 0.0,
    }  # fmt: skip
    assert back["model"].keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(back["model"][name], weight), name


def test_names_of_compiled_models_and_masks_of_old_versions_say_nothing(tmp_path: Path):
    theirs = their_weights("A")
    plain = read_authors(write_theirs(tmp_path / "plain.pt", theirs))
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, BLOCK, BLOCK).tril() for n in range(LAYERS)}
    compiled = {f"_orig_mod.{name}": weight for name, weight in (theirs | masks).items()}
    other = read_authors(write_theirs(tmp_path / "compiled.pt", compiled))
    assert other.config == plain.config
    assert other.weights.keys() == plain.weights.keys()
    assert all(torch.equal(other.weights[name], weight) for name, weight in plain.weights.items())


def test_a_model_without_layer_scale_has_one_of_ones_there():
    sizes = {"layers": 2, "heads": HEADS, "width": WIDTH, "vocab_size": VOCAB, "max_positions": BLOCK}
    model = TostLM(validate(ModelConfig, {**sizes, "layer_scale": 0.0}, "test")).eval()
    theirs = to_authors(model.config, model.state_dict(), 0)["model"]
    assert torch.equal(theirs["transformer.h.1.gamma2"], torch.ones(WIDTH))
    with torch.no_grad():
        assert_close(model(tokens()).logits, their_logits(theirs, tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (
            {"membership": "energy-mean", "denom_bias": "head"},
            ["model.membership 'energy-mean': the released code has no such model, only 'energy-share'",
             "model.denom_bias 'head': the released code has no such model, only 'position'"],
        ),
        ({"pattern": "TA"}, ["model.pattern 'TA': the released code has no such model, only 'T'"]),
        (
            {"pattern": "A", "layer_scale": 0.0},
            ["model.rope_theta 10000.0: the released code has no such model, only 0.0"],
        ),
        (
            {"pattern": "A", "layer_scale": 0.0, "rope_theta": 0.0, "gelu": "tanh"},
            ["model.gelu 'tanh': the released code has no such model, only 'exact'"],
        ),
    ],
)  # fmt: skip
def test_models_that_the_released_code_does_not_have_are_refused(settings: dict, problems: list[str]):
    tree = {"layers": 2, "heads": 2, "width": 8, **settings}
    with pytest.raises(ConfigError) as error:
        to_authors(validate(ModelConfig, tree, "test"), {}, 0)
    assert str(error.value).split("\n") == problems


def without(name: str) -> dict[str, Tensor]:
    return {key: weight for key, weight in their_weights().items() if key != f"transformer.{name}"}


@pytest.mark.parametrize(
    ("weights", "arguments", "problem"),
    [
        (without("h.1.attn.temp"), {}, r"lacks h\.1\.attn\.temp$"),
        (without("wte.weight"), {}, r"lacks wte\.weight$"),
        (their_weights() | {"transformer.h.0.attn.c_gate.weight": torch.ones(2)}, {},
         r"holds what such a model does not have: h\.0\.attn\.c_gate\.weight$"),
        (their_weights(), {"block_size": 16},
         r"h\.0\.attn\.denom_bias is of shape \[2, 12, 1\], .* say \[2, 16, 1\]|wpe\.weight is of shape \[12, 8\], .* "
         r"say \[16, 8\]"),
        (their_weights() | {"transformer.ln_f.weight": torch.ones(8, dtype=torch.int64)}, {},
         r"ln_f\.weight is no tensor of floating point"),
        (their_weights() | {"lm_head.weight": torch.ones(VOCAB, WIDTH)}, {}, r"lm_head\.weight is not the token embed"),
        ({"transformer.wte.weight": torch.ones(2)}, {}, r"lacks lm_head\.weight"),
        (their_weights(), {"n_layer": 3}, r"is said to have 3 layers, and holds weights of 2"),
        (their_weights(), {"n_head": 3}, r"model_args: model\.width 8 is not divisible by model\.heads 3"),
        (their_weights(), {"rotary": True}, r"model_args: rotary True: an option that is not understood"),
    ],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_sizes_are_named(
    tmp_path: Path, weights: dict[str, Tensor], arguments: dict, problem: str
):
    path = write_theirs(tmp_path / "ckpt.pt", weights, **arguments)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        read_authors(path)
    assert re.search(problem, str(error.value)), error.value
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.target}",)


def test_a_hostile_pickle_is_refused_and_never_run(tmp_path: Path):
    target, path = tmp_path / "was_run", tmp_path / "ckpt.pt"
    write_theirs(path, their_weights() | {"more": Payload(target)})
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: refused: reading it would run posix\.system, .* nothing of"):
        read_authors(path)
    assert not target.exists()
    path.write_bytes(pickle.dumps(Payload(target)))
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: damaged, or not a file of torch\.save"):
        read_authors(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # it does what it is refused for
    assert target.exists()


def test_damaged_and_other_files_are_refused(tmp_path: Path):
    whole = write_theirs(tmp_path / "whole.pt", their_weights()).read_bytes()
    weight = their_weights()["transformer.wte.weight"].numpy().tobytes()
    place = whole.index(weight)
    path, other = tmp_path / "ckpt.pt", tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "text")
    contents = {
        "is not right": whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
        "damaged, or not a file of torch.save": whole[: len(whole) // 2],
        "torch.save: copy it again": b"",
        "RuntimeError": other.read_bytes(),
    }
    for problem, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(problem)) as error:
            read_authors(path)
        assert "\n" not in str(error.value)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="not a checkpoint of the released code: it holds no dictionary 'model'"):
        read_authors(path)


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="theirs: cannot be written: File too large"):
            write_authors(tmp_path / "theirs", {"model": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
