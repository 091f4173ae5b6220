"""Cells of `benchmarks.precision`."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import engine_of, python_sources, state_bytes_of
from benchmarks.measure import call_seconds
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.ops.positions import SequenceInfo, rotary_cos_sin
from tost_lm.optim.settings import OptimConfig, learning_rate
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import assert_as_accurate

CORPUS_BYTES = 4_000_000
BLOCKS = 50
AS_ACCURATE = 4


def hidden_errors(device: str, model: dict[str, Any], layer_scales: list[float], tokens: int) -> dict[str, Any]:
    """For each LayerScale: `error`, the norm of the difference between the last hidden state in bfloat16 and with the
    same weights in float32, as a fraction of what the blocks add; and `added`, that as a fraction of the embedding."""
    rows = []
    for layer_scale in layer_scales:
        torch.manual_seed(0)
        lm = TostLM(validate(ModelConfig, {**model, "layer_scale": layer_scale}, "benchmarks.precision")).to(device)
        ids_BT = torch.randint(lm.config.vocab_size, (4, tokens), device=device)
        _, narrow = _first_and_last(lm.bfloat16(), ids_BT)
        first, wide = _first_and_last(lm.float(), ids_BT)
        added = (wide - first).norm()
        error = float((narrow - wide).norm() / added)
        rows.append({"layer_scale": layer_scale, "error": error, "added": float(added / first.norm())})
    return {"rows": rows}


@torch.no_grad()
def _first_and_last(lm: TostLM, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream before the first block and after the last."""
    found: list[Tensor] = []
    read = lambda _, inputs: found.append(inputs[0].double())
    hooks = [module.register_forward_pre_hook(read) for module in (lm.blocks[0], lm.norm)]
    lm(ids_BT)
    for hook in hooks:
        hook.remove()
    first, last = found
    return first, last


def softmax_errors(device: str, model: dict[str, Any], dtype: str, ends: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A softmax layer in `dtype` over a row of documents that end at `ends`, beside its formula in float64 on the CPU.

    For the output and each gradient: `error` and, of the formula in `dtype` on the device, `formula_error`, as
    fractions of the norm; `failed` if the layer is not as accurate (`assert_as_accurate` with factor AS_ACCURATE).
    """
    settings = validate(ModelConfig, {**model, "pattern": "A"}, "benchmarks.precision")
    torch.manual_seed(0)
    layer = SoftmaxMixer(settings).to(device, getattr(torch, dtype))
    with torch.no_grad():
        layer.in_proj.weight *= 3  # scores with a standard deviation of about 3
    x_BTC, dy_BTC = torch.randn(2, 1, ends[-1], settings.width, device=device, dtype=getattr(torch, dtype))
    cu_seqlens = None if len(ends) == 1 else torch.tensor([0, *ends], dtype=torch.int32)

    def results(layer: SoftmaxMixer, mix: Callable[..., Tensor]) -> dict[str, Tensor]:
        layer.zero_grad()
        x, dy = (x.detach().to(layer.in_proj.weight) for x in (x_BTC, dy_BTC))
        info = SequenceInfo.of(x.requires_grad_()[..., 0], None, cu_seqlens, output_state=False)
        rotary = rotary_cos_sin(info.position, settings.width // settings.heads, settings.rope_theta, x.dtype)
        y = mix(layer, x, replace(info, rotary=rotary))
        y.backward(dy)
        gradients = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        return {"output": y.detach(), **{f"gradient of {name}": g for name, g in gradients.items() if g is not None}}

    exact = results(deepcopy(layer).cpu().double(), _softmax_formula)
    formula = results(layer, _softmax_formula)
    ours = results(layer, lambda layer, x, info: layer(x, None, info)[0])
    for name, truth in exact.items():
        near, plain = ours[name].cpu(), formula[name].cpu()
        errors = [float((x.double() - truth).norm() / truth.norm()) for x in (near, plain)]
        cell = {"tensor": name, "error": errors[0], "formula_error": errors[1]}
        try:
            assert_as_accurate(near, plain, truth, name, AS_ACCURATE)
        except AssertionError as error:
            cell["failed"] = str(error)
        yield cell


def _softmax_formula(layer: SoftmaxMixer, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
    """The layer with all scores in memory and a mask of T × T."""
    q, k, v = layer.project(x_BTC, info)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    i_T = torch.arange(x_BTC.shape[1], device=x_BTC.device)
    start_T, distance_TT = i_T - info.position, i_T[:, None] - i_T
    visible_TT = (start_T[:, None] == start_T) & (distance_TT >= 0) & (distance_TT < (layer.window or len(i_T)))
    scores_BHTT = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible_TT, -torch.inf)
    return layer.out_proj((scores_BHTT.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def losses(device: str, model: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Mean losses of BLOCKS equal parts of the training, the median seconds of a step, and bytes of weights and
    optimizer state."""
    settings = validate(ModelConfig, model, "benchmarks.precision")
    steps, T = train["steps"], train["seq_len"]
    optim = OptimConfig(lr=train["lr"], min_lr=train["lr"] / 10, warmup_steps=train["warmup_steps"])
    engine = engine_of(settings, device, bfloat16=train["dtype"] == "bfloat16", optim=optim, seed=train["seed"])
    corpus, generator = python_sources(CORPUS_BYTES), torch.Generator().manual_seed(train["seed"])
    each: list[float] = []
    seconds: list[float] = []
    for step in range(steps):
        starts = torch.randint(len(corpus) - T, (train["batch"],), generator=generator)
        windows = torch.stack([corpus[start : start + T + 1] for start in starts]).long().to(device)
        batch = MicroBatch(windows[:, :-1], windows[:, 1:])

        def one_step(batch: MicroBatch = batch, step: int = step) -> None:
            outcome = train_step(engine, [batch], tile(engine.mesh, T), learning_rate(step, steps, optim))
            each.append(outcome.loss)

        seconds.append(call_seconds(one_step, device))
    width = max(1, steps // BLOCKS)
    means = [mean(each[start : start + width]) for start in range(0, steps - width + 1, width)]
    return {"losses": means, "seconds": median(seconds), "state_bytes": state_bytes_of(engine)}
