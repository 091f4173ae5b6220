"""A plain PyTorch training loop over the weights of one of our models: the layers as formulas of torch, with its
attention and the delta rule of fla-core; whole logits; and AdamW under autocast."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    conv1d,
    cross_entropy,
    linear,
    pad,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from benchmarks.engine import engine_of
from benchmarks.measure import interleaved_seconds
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.mixers.delta.layer import unit_length
from tost_lm.mixers.delta.settings import CONV_TAPS
from tost_lm.mixers.tssa.statistics import ENERGY_FLOOR
from tost_lm.model import ModelConfig
from tost_lm.model.transforms import compile_blocks
from tost_lm.ops.positions import apply_rotary, rotary_cos_sin
from tost_lm.ops.precision import MASS_FLOOR
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import TiledLM, tile
from tost_lm.testing import FLOAT32_REORDERED, assert_close

LossOf = Callable[[TiledLM, Tensor, Tensor], Tensor]
"""loss(model, tokens_BT, labels_BT)"""


def plain_loop(settings: ModelConfig, device: str, seed: int = 0) -> Callable[[LossOf, MicroBatch], Tensor]:
    """`step(loss_of, batch)`, which trains a new model and returns the loss; on a GPU with bfloat16 products."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = TiledLM(settings)
    optim = OptimConfig()
    optimizer = ADAMW.build(model, optim)

    def step(loss_of: LossOf, batch: MicroBatch) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, batch.tokens, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def beside_plain_loop(device: str, like: ModelConfig, rows: int, tokens: int) -> dict[str, Any]:
    """A cell of steps of ours and of the plain loop, both compiled, in turns. The model has the pattern and sizes of
    `like`, in the form of `plain_loss`; the first losses must be equal within a rounding."""
    sizes = like.model_dump(include={"pattern", "layers", "heads", "width", "vocab_size"})
    form = {"positions": "learned", "max_positions": tokens, "layer_scale": 1.0, "softmax": {"rope_theta": 1e4}}
    settings = validate(ModelConfig, {**sizes, **form}, "benchmarks.plain")
    windows = torch.randint(settings.vocab_size, (rows, tokens + 1), device=device)
    batch = MicroBatch(windows[:, :-1], windows[:, 1:])
    engine = engine_of(settings, device, bfloat16=device == "cuda", prepare=compile_blocks)
    ours = lambda: train_step(engine, [batch], tile(engine.mesh, tokens), OptimConfig().lr)
    plain = partial(plain_loop(settings, device), partial(plain_loss, block=torch.compile(block)), batch)
    losses = [ours().loss, float(plain())]
    seconds = interleaved_seconds({"ours": ours, "plain": plain}, device, budget_s=10)
    cell = {
        "case": f"{settings.pattern}, {rows} × {tokens:,} tokens",
        "value": f"{median(seconds['ours']) / median(seconds['plain']):.2f} × the time of a plain loop",
        "beside": f"{1e3 * median(seconds['ours']):,.3g} ms; first losses {losses[0]:.4f} and {losses[1]:.4f}",
        "seconds": seconds, "losses": losses,
    }  # fmt: skip
    try:
        rounding = torch.finfo(torch.bfloat16).eps if device == "cuda" else FLOAT32_REORDERED
        assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rounding, "the first loss")
    except AssertionError as error:
        cell["failed"] = str(error)
    return cell


def block(block: Any, letter: str, x_BTC: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """A block of our model by its formulas."""
    x_BTC = x_BTC + block.mixer_scale(MIXERS[letter](block.mixer, block.mixer_norm(x_BTC), rotary))
    return x_BTC + block.mlp_scale(block.mlp(block.mlp_norm(x_BTC)))


def plain_loss(model: TiledLM, tokens_BT: Tensor, labels_BT: Tensor, block: Callable[..., Tensor] = block) -> Tensor:
    """The loss of a model with learned positions, rows that are no packed documents, and layers of `MIXERS`."""
    positions, config, T = model.positions, model.config, tokens_BT.shape[1]
    assert positions is not None
    x_BTC = model.embedding(tokens_BT) + positions.weight[:T]
    rotary = config.rotary and rotary_cos_sin(torch.arange(T, device=x_BTC.device), config.rotary, x_BTC.dtype)
    for ours, letter in zip(model.blocks, config.letters, strict=True):
        x_BTC = block(ours, letter, x_BTC, rotary)
    logits_BTV = linear(model.norm(x_BTC), model.embedding.weight)
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def _tssa(layer: Any, x_BTC: Tensor, _rotary: object) -> Tensor:
    w_BTHD = layer.in_proj(x_BTC).unflatten(-1, (layer.heads, -1))
    return layer.out_proj(tssa_formulas(w_BTHD, layer.temp, layer.denom_bias[:, : x_BTC.shape[1]]).flatten(-2))


def tssa_formulas(w_BTHD: Tensor, temp_H: Tensor, bias_HT: Tensor) -> Tensor:
    """TSSA as the released training program computes it, [B, T, H, D]."""
    w_BHTD = w_BTHD.transpose(1, 2)
    w_sq = w_BHTD.square()
    share = w_sq / w_sq.cumsum(-2).clamp_min(ENERGY_FLOOR) + bias_HT[..., None]
    pi_BHT = (share.sum(-1) * temp_H[:, None]).softmax(1)
    moment = (w_sq * pi_BHT[..., None]).cumsum(-2) / (pi_BHT.cumsum(-1) + MASS_FLOOR)[..., None]
    y_BHTD = -(w_BHTD * pi_BHT[..., None]) * (1 / (1 + moment))
    return y_BHTD.transpose(1, 2)


def _attention(layer: Any, x_BTC: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = layer.in_proj(x_BTC).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (apply_rotary(x, rotary) for x in (q, k))
    return layer.out_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def _delta(layer: Any, x_BTC: Tensor, _rotary: object) -> Tensor:
    K, heads = layer.key_size, (layer.heads, layer.value_size)
    projected = layer.in_proj(x_BTC).unflatten(-1, (layer.key_heads, -1))
    tokens, gate, beta, step = projected.split(layer.sizes, -1)
    before_BET = pad(tokens.flatten(-2).mT, (CONV_TAPS - 1, 0))
    tokens_BTE = silu(conv1d(before_BET, layer.conv[:, None], groups=len(layer.conv)).mT)
    query, key, value = tokens_BTE.unflatten(-1, (layer.key_heads, -1)).split([K, K, layer.sizes[1]], -1)
    rates = layer.rates(step.flatten(-2), beta.flatten(-2))
    y_BTHV = _delta_rule(query, key, value.flatten(-2).unflatten(-1, heads), *rates)
    y_BTHV = rms_norm(y_BTHV, heads[1:], eps=layer.norm_epsilon) * layer.norm
    return layer.out_proj((y_BTHV * silu(gate.flatten(-2).unflatten(-1, heads))).flatten(-2))


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """By fla-core, on a CPU by its formula, which is in torch."""
    rates: Any = {"g": log_decay, "beta": beta}
    if query.is_cuda:
        from fla.ops import gated_delta_rule

        kernel: Any = gated_delta_rule.chunk_gated_delta_rule
        return kernel(query, key, value, **rates, use_qk_l2norm_in_kernel=True)[0]
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    return naive_chunk_gated_delta_rule(unit_length(query), unit_length(key), value, **rates)[0].to(value)


MIXERS: dict[str, Callable[..., Tensor]] = {"T": _tssa, "A": _attention, "D": _delta}
