"""The encoder against plain formulas in float64, with every gradient; packed documents, permutations and messages."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, normalize

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.extra.encoder.model import Encoder
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.mixers.slots.layer import BidirectionalSlots
from tost_lm.testing import assert_close

LAYERS, HEADS, WIDTH, VOCAB, CLASSES = 2, 2, 8, 11, 3
OFFSETS = (0, 4, 5, 14, 20)
FORMS: dict[str, dict[str, Any]] = {
    "ids, mean": {"vocab_size": VOCAB},
    "ids, class token, two towers": {"vocab_size": VOCAB, "pooling": "class_token", "towers": 2},
    "softmax attention, two towers": {"vocab_size": VOCAB, "pattern": "A", "towers": 2, "positions": "none"},
    "both mixers, no LayerScale, no bias": {"vocab_size": VOCAB, "pattern": "TA", "layer_scale": 0.0, "bias": False},
    "convolution, and no mixer": {"vocab_size": VOCAB, "pattern": "CN", "mlp_width": 5},
    "images, class token": {"patch_size": 4, "pooling": "class_token"},
}
all_forms = pytest.mark.parametrize("form", FORMS)


def config_of(**settings: Any) -> EncoderConfig:
    shape = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "classes": CLASSES, "max_positions": 9}
    return validate(EncoderConfig, {**shape, **settings}, "test")


def drawn_encoder(**settings: Any) -> Encoder:
    """Every parameter shows in the logits."""
    torch.manual_seed(0)
    model = Encoder(config_of(**settings)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.4 * torch.randn_like(parameter))
    return model


def inputs(model: Encoder) -> tuple[Tensor, Tensor | None]:
    """Packed ids, or images of 2 × 3 patches."""
    generator = torch.Generator().manual_seed(1)
    if model.config.patch_size:
        return torch.randn(4, 3, 8, 12, generator=generator).double(), None
    return torch.randint(VOCAB, (1, OFFSETS[-1]), generator=generator), torch.tensor(OFFSETS)


def by_formula(p: dict[str, Tensor], config: EncoderConfig, inputs: Tensor, offsets: Tensor | None) -> Tensor:
    """The logits from named weights, one document after the other, with nothing of ours but the names."""
    if offsets is None:
        kernel = p["embedding.weight"].unflatten(1, (3, 4, 4))
        images = conv2d(inputs, kernel, p["embedding.bias"], stride=4)
        documents = [*images.flatten(2).mT]
    else:
        documents = [p["embedding.weight"][inputs[0, a:b]] for a, b in pairwise(offsets.tolist())]
    features = torch.stack([encoded(p, config, x) for x in documents])
    if config.towers == 2:
        x, y = features[0::2], features[1::2]
        both = torch.cat([x, y, x * y, x - y], 1) @ p["head.pair.weight"].T + p["head.pair.bias"]
        features = 0.5 * both * (1 + torch.erf(both / math.sqrt(2)))
    return features @ p["head.linear.weight"].T + p["head.linear.bias"]


def encoded(p: dict[str, Tensor], config: EncoderConfig, x: Tensor) -> Tensor:
    """The features [C] of one document [T, C]."""
    if config.positions == "learned":
        x = x + p["positions.weight"][: len(x)]
    if config.pooling == "class_token":
        x = torch.cat([p["class_token.weight"], x])
    for i, letter in enumerate(config.pattern * (LAYERS // len(config.pattern))):
        q = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        mixed = MIXED[letter](q, normed(q, "mixer_norm", x))
        x = x + q.get("mixer_scale.gamma", 1) * linear(q, "mixer.out_proj", mixed)
        h = linear(q, "mlp.in_proj", normed(q, "mlp_norm", x))
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        x = x + q.get("mlp_scale.gamma", 1) * linear(q, "mlp.out_proj", h)
    x = normed(p, "norm", x)
    return x[0] if config.pooling == "class_token" else x.mean(0)


def statistics_attention(q: dict[str, Tensor], x: Tensor) -> Tensor:
    """TSSA as the released vision code writes it, of one document."""
    w = linear(q, "mixer.in_proj", x).unflatten(-1, (HEADS, -1)).transpose(0, 1)  # [H, T, D]
    scores = (normalize(w, dim=1) ** 2).sum(-1) * q["mixer.temp"][:, None]
    pi = torch.exp(scores) / torch.exp(scores).sum(0)
    dots = (pi / (pi.sum(-1, keepdim=True) + 1e-8))[:, None] @ w**2
    return (-(w * pi[..., None]) * (1 / (1 + dots))).transpose(0, 1).flatten(1)


def softmax_attention(q: dict[str, Tensor], x: Tensor) -> Tensor:
    query, key, value = linear(q, "mixer.in_proj", x).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
    scores = query @ key.mT / math.sqrt(WIDTH / HEADS)
    return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)


def convolution(q: dict[str, Tensor], x: Tensor) -> Tensor:
    """A token t reads tokens t − 3 to t + 3 that exist; the weights of both directions are oldest first."""
    x = linear(q, "mixer.in_proj", x)
    rows = []
    for t in range(len(x)):
        before = [x[t - j] * q["mixer.from_start"].flatten(0, 1)[:, 3 - j] for j in range(4) if t - j >= 0]
        after = [x[t + j] * q["mixer.from_end"].flatten(0, 1)[:, 3 - j] for j in range(4) if t + j < len(x)]
        rows.append(torch.stack(before + after).sum(0))
    return torch.stack(rows) * torch.stack(rows).sigmoid()


def no_mixer(q: dict[str, Tensor], x: Tensor) -> Tensor:
    x = linear(q, "mixer.in_proj", x)
    return x * x.sigmoid()


MIXED = {"T": statistics_attention, "A": softmax_attention, "C": convolution, "N": no_mixer}


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def normed(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p.get(
        f"{name}.bias", 0
    )


@all_forms
def test_logits_and_every_gradient_equal_the_formulas(form: str):
    model = drawn_encoder(**FORMS[form])
    documents, offsets = inputs(model)
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ours, theirs = model(documents, offsets), by_formula(copies, model.config, documents, offsets)
    assert_close(ours, theirs, 1e-12, "logits")
    pull = torch.randn_like(theirs)
    gradients = torch.autograd.grad(ours, [*model.parameters()], pull)
    expected = torch.autograd.grad(theirs, [*copies.values()], pull)
    for name, mine, truth in zip(copies, gradients, expected, strict=True):
        assert_close(mine, truth, 1e-11, name)


@pytest.mark.parametrize(
    "settings", [{"pattern": "TA"}, {"pattern": "SC"}, {"pooling": "class_token", "positions": "sinusoidal"}]
)
def test_packed_documents_equal_rows_and_each_alone(settings: dict[str, Any]):
    model = drawn_encoder(vocab_size=VOCAB, **settings)
    ids, offsets = inputs(model)
    alone = torch.cat([model(ids[:, a:b]) for a, b in pairwise(OFFSETS)])
    assert_close(model(ids, offsets), alone, 1e-12)
    rows = model(ids.view(5, 4))
    assert_close(rows, model(ids, torch.arange(0, 21, 4)), 1e-12)


def test_without_positions_the_order_of_tokens_has_no_effect():
    model = drawn_encoder(vocab_size=VOCAB, pattern="TA", positions="none", pooling="class_token")
    ids, _ = inputs(model)
    assert_close(model(ids.flip(1)), model(ids), 1e-12)
    model = drawn_encoder(vocab_size=VOCAB, positions="learned", max_positions=OFFSETS[-1])
    assert (model(ids.flip(1)) - model(ids)).norm() > 1e-3 * model(ids).norm()


def test_half_of_the_heads_of_slot_memory_read_from_each_end():
    model = drawn_encoder(vocab_size=VOCAB, pattern="S", positions="none", layers=1, width=32)
    ids = inputs(model)[0][:, :9]
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, BidirectionalSlots)
    assert (model(ids.flip(1)) - model(ids)).norm() > 1e-3 * model(ids).norm()
    expected = model(ids)
    mixer.from_start, mixer.from_end = mixer.from_end, mixer.from_start
    assert_close(model(ids.flip(1)), expected, 1e-12)

    last_reads, first_reads = tokens_that_influence(model, ids, -1), tokens_that_influence(model, ids, 0)
    assert last_reads == first_reads == list(range(9))
    with torch.no_grad():
        mixer.from_end.out_proj.weight.zero_()
    assert tokens_that_influence(model, ids, 4) == list(range(5))


def tokens_that_influence(model: Encoder, ids: Tensor, token: int) -> list[int]:
    """Positions of the tokens whose embedding has a gradient of the features of a token."""
    embedded = model.embedding(ids).detach().requires_grad_()
    model.embedding.forward = lambda _: embedded  # pyright: ignore[reportAttributeAccessIssue]
    features, _ = model.encode(ids)
    (gradient,) = torch.autograd.grad(features[0, token] @ torch.arange(1.0, 1 + model.config.width).double(), embedded)
    del model.embedding.forward
    return [t for t, row in enumerate(gradient[0]) if row.norm() > 1e-9]


def test_a_seed_draws_the_weights_and_the_meta_device_draws_nothing():
    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Encoder(config_of(vocab_size=VOCAB)).head.linear.weight

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    with torch.device("meta"):
        assert draw(0).is_meta


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the model reads either ids or images; set model.vocab_size or model.patch_size"),
        ({"vocab_size": 5, "patch_size": 4}, "the model reads either ids or images"),
        ({"vocab_size": 5, "pattern": "TG"}, "invalid model.pattern: 'TG'; use the letters T"),
        ({"vocab_size": 5, "pattern": "S", "heads": 1}, "model.heads 1 is odd, but half of the heads of S layers"),
        ({"vocab_size": 5, "heads": 3}, "model.width 8 is not divisible by model.heads 3; change one of them"),
        ({"vocab_size": 5, "pattern": "TTA"}, "model.layers 2 is not a multiple of the 3 letters"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)


def test_inputs_that_do_not_fit_are_named():
    ids = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"12 tokens are more than the model's positions \(model.max_positions = 9\)"):
        drawn_encoder(vocab_size=VOCAB)(ids)
    with pytest.raises(ValueError, match="2 towers read pairs of documents, got 1; give an even number"):
        drawn_encoder(vocab_size=VOCAB, towers=2)(ids[:, :5])
    with pytest.raises(ConfigError, match=r"sides that are multiples of model.patch_size 4, got \[1, 3, 8, 10\]"):
        drawn_encoder(patch_size=4)(torch.zeros(1, 3, 8, 10).double())
