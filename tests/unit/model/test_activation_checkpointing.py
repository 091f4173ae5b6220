"""Blocks and portions of MLPs that the backward computes again: the same numbers, and one portion at a time."""

from typing import Any

import pytest
import torch
from other_forms import other_forms
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.testing import assert_close

B, T, C, H, VOCAB = 2, 26, 32, 4, 64
LESS: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"mlp_tile_tokens": 7},
    {"mlp_tile_tokens": 100},
    {"activation_checkpointing": "full", "mlp_tile_tokens": 4},
]


def drawn_model(**settings: Any) -> TostLM:
    torch.manual_seed(0)
    shape = {"layers": 3, "heads": H, "width": C, "vocab_size": VOCAB, "max_positions": 2 * T, "layer_scale": 1.0}
    model = TostLM(
        validate(ModelConfig, {"pattern": "TTA", "softmax": {"window": 5}, "bias": True, **shape, **settings}, "test")
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("denom_bias"):
            nn.init.normal_(parameter, 0.5, 0.1)
    return model.double()


def drawn_tokens(rows: int = B) -> Tensor:
    return torch.randint(VOCAB, (rows, T), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: TostLM, **inputs: Any) -> dict[str, Tensor]:
    """Gradients of the loss and of the state after the last token, so that gradients come in for both."""
    output, parameters = model(inputs.pop("tokens"), **inputs), dict(model.named_parameters())
    mixers = [part for layer in output.state.layers for part in layer if part.is_floating_point()]
    loss = output.loss + sum(part.square().mean() for part in mixers)
    return {"loss": loss, **dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))}


def assert_same(less: dict[str, Any], model: dict[str, Any] | None = None, **inputs: Any) -> None:
    expected = loss_and_gradients(drawn_model(**(model or {})), **inputs)
    found = loss_and_gradients(apply_activation_checkpointing(drawn_model(**(model or {})), **less), **inputs)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)


@pytest.mark.quick
@pytest.mark.parametrize("less", LESS)
def test_loss_state_and_every_gradient_are_the_same(less: dict[str, Any]):
    rows, row = drawn_tokens(), drawn_tokens(1)
    assert_same(less, tokens=rows, labels=rows)
    assert_same(less, {"layer_scale": 0.0, "bias": False, **other_forms(window=5)}, tokens=rows, labels=rows)
    assert_same(less, tokens=row, labels=row, cu_seqlens=torch.tensor([0, 3, 20, T], dtype=torch.int32))


class WideTokens(TorchDispatchMode):
    """How many tokens have anything as wide as the MLP in one tensor, at most."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Not weights and their gradients, 4·C × C.
        if isinstance(result, Tensor) and result.dim() == 3 and result.shape[-1] == 4 * C:
            self.most = max(self.most, result.shape[0] * result.shape[1])
        return result


@pytest.mark.parametrize(("less", "most"), [({}, B * T), ({"mlp_tile_tokens": 5}, B * 5), (LESS[3], B * 4)])
def test_what_is_as_wide_as_the_mlp_is_there_for_one_portion_only(less: dict[str, Any], most: int):
    model = apply_activation_checkpointing(drawn_model(), **less)
    with WideTokens() as forward:
        loss = model(drawn_tokens(), labels=drawn_tokens()).loss
    with WideTokens() as backward:
        loss.backward()
    assert (forward.most, backward.most) == (most, most)
