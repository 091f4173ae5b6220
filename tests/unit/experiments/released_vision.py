"""The released vision model by its formulas (arXiv 2412.17810), from weights with the released names.

Transcribed with nothing of ours: convolutions are sums over shifted images, attention a loop over heads.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def drawn(
    width: int, heads: int, layers: int, classes: int, convolutions: int = 4, dtype: torch.dtype = torch.float64
) -> Weights:
    """Weights and statistics in which every one shows in the logits, in the order of the released code."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, mean: float = 0.0, std: float = 0.3) -> Tensor:
        return (mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    def linear(name: str, out: int, into: int) -> Weights:
        return {f"{name}.weight": draw(out, into, std=1 / math.sqrt(into)), f"{name}.bias": draw(out)}

    def norm(name: str, channels: int = width) -> Weights:
        return {f"{name}.weight": draw(channels, mean=1.0), f"{name}.bias": draw(channels)}

    def branches(block: str) -> Weights:
        gammas = {f"{block}.gamma{branch}": draw(width, mean=1.0) for branch in (1, 2)}
        mlp = linear(f"{block}.mlp.fc1", 4 * width, width) | linear(f"{block}.mlp.fc2", width, 4 * width)
        return gammas | norm(f"{block}.norm1") | norm(f"{block}.norm2") | mlp

    w: Weights = {"cls_token": draw(1, 1, width)}
    channels = [3, *(width // 2**i for i in reversed(range(convolutions)))]
    for i, (before, after) in enumerate(pairwise(channels)):
        stage = f"patch_embed.proj.{2 * i}"
        w[f"{stage}.0.weight"] = draw(after, before, 3, 3)
        w |= norm(f"{stage}.1", after)
        w[f"{stage}.1.running_mean"] = draw(after)
        w[f"{stage}.1.running_var"] = draw(after, mean=1.0) ** 2 + 0.1
        w[f"{stage}.1.num_batches_tracked"] = torch.tensor(7 + i)
    w["pos_embeder.token_projection.weight"] = draw(width, 64, 1, 1)
    w["pos_embeder.token_projection.bias"] = draw(width)
    for block in (f"blocks.{i}" for i in range(layers)):
        w |= branches(block) | {f"{block}.attn.temp": draw(heads, 1, mean=1.0)}
        w |= linear(f"{block}.attn.qkv", width, width) | linear(f"{block}.attn.to_out.0", width, width)
    for block in ("cls_attn_blocks.0", "cls_attn_blocks.1"):
        w |= branches(block) | linear(f"{block}.attn.qkv", 3 * width, width)
        w |= linear(f"{block}.attn.proj", width, width)
    return w | norm("norm") | linear("head", classes, width)


def logits(w: Weights, images: Tensor, training: bool = False) -> Tensor:
    """Logits [B, classes] of images [B, 3, height, width]; `training`: with the statistics of this batch."""
    heads = len(w["blocks.0.attn.temp"])
    x = images
    convolutions = sum(name.endswith(".0.weight") and name.startswith("patch_embed") for name in w)
    for i in range(convolutions):
        x = gelu(x) if i else x
        x = batch_norm(
            w, f"patch_embed.proj.{2 * i}.1", convolved(x, w[f"patch_embed.proj.{2 * i}.0.weight"]), training
        )
    kernel = w["pos_embeder.token_projection.weight"][:, :, 0, 0]
    positions = fourier(*x.shape[2:]).to(x.dtype) @ kernel.T + w["pos_embeder.token_projection.bias"]
    tokens = torch.stack([image.reshape(len(image), -1).T for image in x]) + positions
    for i in range(sum(name.endswith("attn.temp") for name in w)):
        block = f"blocks.{i}"
        mixed = token_statistics(w, block, normed(w, f"{block}.norm1", tokens))
        tokens = tokens + w[f"{block}.gamma1"] * mixed
        tokens = tokens + w[f"{block}.gamma2"] * mlp(w, block, normed(w, f"{block}.norm2", tokens))
    x = torch.cat([w["cls_token"].repeat(len(images), 1, 1), tokens], 1)
    for block in ("cls_attn_blocks.0", "cls_attn_blocks.1"):
        n = normed(w, f"{block}.norm1", x)
        attended = torch.cat([class_attention(w, block, n, heads)[:, None], n[:, 1:]], 1)
        x = normed(w, f"{block}.norm2", x + w[f"{block}.gamma1"] * attended)
        x = x + torch.cat([w[f"{block}.gamma2"] * mlp(w, block, x[:, :1]), x[:, 1:]], 1)
    return linear(w, "head", normed(w, "norm", x)[:, 0])


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """3 × 3, stride 2, one pixel of zeros around."""
    height, width = x.shape[2:]
    padded = torch.zeros(*x.shape[:2], height + 3, width + 3, dtype=x.dtype)
    padded[:, :, 1 : height + 1, 1 : width + 1] = x
    rows, columns = (height + 1) // 2, (width + 1) // 2
    return sum(
        torch.einsum("oi,biyx->boyx", kernel[:, :, dy, dx],
                     padded[:, :, dy : dy + 2 * rows - 1 : 2, dx : dx + 2 * columns - 1 : 2])
        for dy in range(3)
        for dx in range(3)
    )  # fmt: skip # pyright: ignore[reportReturnType]


def batch_norm(w: Weights, name: str, x: Tensor, training: bool) -> Tensor:
    by_channel = x.transpose(0, 1).flatten(1)
    mean, variance = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    if training:
        mean = by_channel.mean(1)
        variance = ((by_channel - mean[:, None]) ** 2).mean(1)
    scale, shift = w[f"{name}.weight"] / (variance + 1e-5).sqrt(), w[f"{name}.bias"]
    return (x - mean[:, None, None]) * scale[:, None, None] + shift[:, None, None]


def fourier(rows: int, columns: int) -> Tensor:
    """[rows · columns, 64]: 32 features of the row, 32 of the column."""

    def features(place: int, count: int) -> list[float]:
        angle = place / (count + 1e-6) * 2 * math.pi
        angles = [angle / 10000 ** (2 * (i // 2) / 32) for i in range(32)]
        return [math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)]

    places = [(y, x) for y in range(1, rows + 1) for x in range(1, columns + 1)]
    return torch.tensor([features(y, rows) + features(x, columns) for y, x in places], dtype=torch.float64)


def token_statistics(w: Weights, block: str, x: Tensor) -> Tensor:
    temp = w[f"{block}.attn.temp"]
    heads = linear(w, f"{block}.attn.qkv", x).chunk(len(temp), -1)  # each [B, T, D]
    shares = [h**2 / (h**2).sum(1, keepdim=True).clamp(min=1e-24) for h in heads]
    scores = torch.stack([t * share.sum(-1) for t, share in zip(temp, shares, strict=True)])  # [H, B, T]
    memberships = torch.exp(scores) / torch.exp(scores).sum(0)
    mixed = []
    for h, pi in zip(heads, memberships[..., None], strict=True):
        moment = (pi / (pi.sum(1, keepdim=True) + 1e-8) * h**2).sum(1, keepdim=True)
        mixed.append(-h * pi / (1 + moment))
    return linear(w, f"{block}.attn.to_out.0", torch.cat(mixed, -1))


def class_attention(w: Weights, block: str, x: Tensor, heads: int) -> Tensor:
    """[B, C]"""
    q, k, v = linear(w, f"{block}.attn.qkv", x).chunk(3, -1)
    found = []
    for query, keys, values in zip(q[:, 0].chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        scores = (keys * query[:, None]).sum(-1) / math.sqrt(query.shape[-1])
        found.append((scores.softmax(-1)[..., None] * values).sum(1))
    return linear(w, f"{block}.attn.proj", torch.cat(found, -1))


def mlp(w: Weights, block: str, x: Tensor) -> Tensor:
    return linear(w, f"{block}.mlp.fc2", gelu(linear(w, f"{block}.mlp.fc1", x)))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def normed(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
