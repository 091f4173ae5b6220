"""Checkpoints of the released code: equal logits, refused files."""

import math
import os
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm
from torch.testing import assert_close

from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.interop.authors import read_authors
from tost_lm.model import ModelConfig, TostLM

pytestmark = pytest.mark.quick

LAYERS, HEADS, WIDTH, BLOCK, VOCAB = 2, 2, 8, 12, 40
SIZES = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK}


def their_weights(kind: str = "T", bias: bool = False, layer_scale: bool = True) -> dict[str, Tensor]:
    """Weights by the names, shapes and order of their model, large enough for every term to matter.

    Their train.py always builds LayerScale; a checkpoint of nanoGPT itself has none.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, mean: float = 0.0, std: float = 0.5) -> Tensor:
        return mean + std * torch.randn(shape, generator=generator)

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": draw(WIDTH, mean=1.0)} | ({f"{name}.bias": draw(WIDTH)} if bias else {})

    def linear(name: str, out: int, into: int) -> dict[str, Tensor]:
        return {f"{name}.weight": draw(out, into)} | ({f"{name}.bias": draw(out)} if bias else {})

    weights = {"wte.weight": draw(VOCAB, WIDTH), "wpe.weight": draw(BLOCK, WIDTH)}
    for block in (f"h.{layer}" for layer in range(LAYERS)):
        if layer_scale:
            weights |= {f"{block}.gamma{branch}": draw(WIDTH, mean=1.0) for branch in (1, 2)}
        weights |= norm(f"{block}.ln_1")
        if kind == "T":
            weights |= {
                f"{block}.attn.temp": draw(HEADS, 1, mean=1.0),
                f"{block}.attn.denom_bias": draw(HEADS, BLOCK, 1),
            }
        weights |= linear(f"{block}.attn.c_attn", WIDTH if kind == "T" else 3 * WIDTH, WIDTH)
        weights |= linear(f"{block}.attn.c_proj", WIDTH, WIDTH) | norm(f"{block}.ln_2")
        weights |= linear(f"{block}.mlp.c_fc", 4 * WIDTH, WIDTH) | linear(f"{block}.mlp.c_proj", WIDTH, 4 * WIDTH)
    named = {f"transformer.{name}": weight for name, weight in (weights | norm("ln_f")).items()}
    return named | {"lm_head.weight": named["transformer.wte.weight"]}


def their_logits(w: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Logits by the formulas of arXiv 2412.17810 and of GPT-2, as in the released code."""
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


def their_checkpoint(weights: dict[str, Any], compiled: bool = False, **arguments: Any) -> dict[str, Any]:
    """All keys that their train.py saves, in its order."""
    is_tssa = any(name.endswith(".temp") for name in weights)
    model_args = {**SIZES, "bias": False, "vocab_size": VOCAB, "dropout": 0.1, "TSSA": is_tssa, **arguments}
    return {
        "model": {f"_orig_mod.{name}": weight for name, weight in weights.items()} if compiled else weights,
        "optimizer": {},
        "model_args": model_args,
        "iter_num": 600000,
        "best_val_loss": torch.tensor(2.75),
        "config": {"dataset": "openwebtext", "compile": compiled, "TSSA": is_tssa},
    }


def write_theirs(path: Path, weights: dict[str, Any], **options: Any) -> Path:
    torch.save(their_checkpoint(weights, **options), path)
    return path


def our_logits(config: ModelConfig, weights: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    model = TostLM(config)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.double().eval()(tokens_BT).logits


def tokens() -> Tensor:
    return torch.randint(VOCAB, (3, BLOCK), generator=torch.Generator().manual_seed(1))


def double(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.double() for name, weight in weights.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "layer_scale"), [("T", True), ("A", True), ("A", False)])
def test_logits_equal_the_formulas(tmp_path: Path, kind: str, layer_scale: bool, bias: bool):
    theirs = their_weights(kind, bias, layer_scale)
    found = read_authors(write_theirs(tmp_path / "ckpt.pt", theirs, compiled=layer_scale, bias=bias))
    assert (found.config.pattern, found.config.bias, found.config.layer_scale > 0) == (kind, bias, layer_scale)
    assert (found.iterations, found.best_nats) == (600000, 2.75)
    logits = our_logits(found.config, found.weights, tokens())
    assert logits.std() > 0.5
    assert_close(logits, their_logits(double(theirs), tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [math.nan, torch.tensor(math.inf)])
def test_numbers_that_are_not_finite_are_none(tmp_path: Path, number: Any):
    """They would not be JSON in the record of a conversion."""
    torch.save(their_checkpoint(their_weights()) | {"best_val_loss": number, "iter_num": number}, tmp_path / "ckpt.pt")
    found = read_authors(tmp_path / "ckpt.pt")
    assert (found.best_nats, found.iterations) == (None, 0)


def test_causal_masks_of_old_versions_are_ignored(tmp_path: Path):
    theirs = their_weights("A")
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, BLOCK, BLOCK).tril() for n in range(LAYERS)}
    path = tmp_path / "ckpt.pt"
    torch.save(their_checkpoint(theirs) | {"model": theirs | masks}, path)
    found, expected = read_authors(path), read_authors(write_theirs(tmp_path / "plain.pt", theirs))
    assert found.config == expected.config
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def without(name: str) -> dict[str, Tensor]:
    return {key: weight for key, weight in their_weights().items() if key != f"transformer.{name}"}


@pytest.mark.parametrize(
    ("weights", "arguments", "problem"),
    [
        (without("h.1.attn.temp"), {}, r"lacks weights: h\.1\.attn\.temp; copy it again$"),
        (their_weights() | {"transformer.h.0.attn.c_gate.weight": torch.ones(2)}, {},
         r"unexpected weights: h\.0\.attn\.c_gate\.weight;"),
        (their_weights(), {"block_size": 16}, r"has shape \[.*12.*\], its settings say \[.*16.*\];"),
        (their_weights() | {"lm_head.weight": torch.ones(VOCAB, WIDTH)}, {}, r"lm_head\.weight differs from the to"),
        ({"transformer.wte.weight": torch.ones(2, 2)}, {}, r"lacks lm_head\.weight;"),
        (their_weights(), {"n_layer": 3}, r"its settings say 3 layers, its weights 2;"),
        (their_weights(), {"rotary": True}, r"model_args: unknown option: rotary True; train without it$"),
        (their_weights("A"), {"TSSA": True}, r"TSSA True contradicts the weights, which are of softmax attention;"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_the_sizes_are_named(
    tmp_path: Path, weights: dict[str, Any], arguments: dict, problem: str
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
    torch.save(their_checkpoint(their_weights()) | {"config": Payload(target)}, path)
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: refused: it would call posix\.system; nothing in it was run"):
        read_authors(path)
    assert not target.exists()
    path.write_bytes(pickle.dumps(Payload(target)))
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: damaged, or not a file of torch\.save"):
        read_authors(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # shows that the payload works
    assert target.exists()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path):
    stored, path = write_theirs(tmp_path / "whole.pt", their_weights()), tmp_path / "ckpt.pt"
    with zipfile.ZipFile(stored) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in whole.infolist():
            bomb.writestr(entry.filename, whole.read(entry))
        bomb.writestr("archive/data/999", bytes(100_000_000))
    assert path.stat().st_size < 1_000_000
    tracemalloc.start()
    with pytest.raises(
        CheckpointError, match=r"ckpt\.pt: refused: its content is 100,\d+,\d+ bytes, more than the fil"
    ):
        read_authors(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_damaged_and_other_files_are_refused(tmp_path: Path):
    whole = write_theirs(tmp_path / "whole.pt", their_weights()).read_bytes()
    weight = their_weights()["transformer.wte.weight"].numpy().tobytes()
    place = whole.index(weight)
    path, other = tmp_path / "ckpt.pt", tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "text")
    contents = {
        "wrong checksum": whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
        "damaged, or not a file of torch.save": whole[: len(whole) // 2],
        "torch.save; copy it again": b"",
        "RuntimeError": other.read_bytes(),
    }
    for problem, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(problem)) as error:
            read_authors(path)
        assert "\n" not in str(error.value)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="not a checkpoint of the released code: it has no dictionary 'model'"):
        read_authors(path)
