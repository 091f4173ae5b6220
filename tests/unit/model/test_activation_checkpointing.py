"""Blocks and portions of MLPs that the backward computes again: the same numbers, and how much less is held."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from other_forms import other_forms
from torch import Tensor, nn
from torch.func import functional_call
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


def drawn_model(layers: int = 3, **settings: Any) -> TostLM:
    torch.manual_seed(0)
    shape = {"layers": layers, "heads": H, "width": C, "vocab_size": VOCAB, "max_positions": 2 * T, "layer_scale": 1.0}
    model = TostLM(
        validate(ModelConfig, {"pattern": "TTA", "softmax": {"window": 5}, "bias": True, **shape, **settings}, "test")
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("denom_bias"):
            nn.init.normal_(parameter, 0.5, 0.1)
    return model.double()


def drawn_tokens(rows: int = B) -> Tensor:
    return torch.randint(VOCAB, (rows, T), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: TostLM, parameters: dict[str, Tensor], **inputs: Any) -> dict[str, Tensor]:
    """Gradients of the loss and of the state after the last token, so that gradients come in for both."""
    output = functional_call(model, parameters, (inputs.pop("tokens"),), inputs)
    mixers = [part for layer in output.state.layers for part in layer if part.is_floating_point()]
    loss = output.loss + sum(part.square().mean() for part in mixers)
    return {"loss": loss, **dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))}


def assert_same(less: dict[str, Any], model: dict[str, Any] | None = None, **inputs: Any) -> None:
    whole = drawn_model(**(model or {}))
    expected = loss_and_gradients(whole, dict(whole.named_parameters()), **inputs)
    holding_less = apply_activation_checkpointing(drawn_model(**(model or {})), **less)
    found = loss_and_gradients(holding_less, dict(holding_less.named_parameters()), **inputs)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)


@pytest.mark.quick
@pytest.mark.parametrize("less", LESS)
def test_loss_state_and_every_gradient_are_the_same(less: dict[str, Any]):
    rows, row = drawn_tokens(), drawn_tokens(1)
    assert_same(less, tokens=rows, labels=rows)
    assert_same(less, {"layer_scale": 0.0, "bias": False, **other_forms(window=5)}, tokens=rows, labels=rows)
    assert_same(less, tokens=row, labels=row, cu_seqlens=torch.tensor([0, 3, 20, T], dtype=torch.int32))


@contextmanager
def held(bytes_of: list[int], parameters: Iterator[Tensor]) -> Iterator[None]:
    """Appends the bytes that autograd keeps of what is computed inside, parameters apart."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield
    bytes_of.append(sum(storages.values()))


def bytes_held_by_a_layer(less: dict[str, Any], pattern: str) -> int:
    """The difference that two layers more make."""
    found: list[int] = []
    for layers in (2, 4):
        model = apply_activation_checkpointing(drawn_model(layers, pattern=pattern, bias=False).float(), **less)
        with held(found, model.parameters()):
            output = model(drawn_tokens(), labels=drawn_tokens(), output_state=False)
        assert output.loss.requires_grad
    return (found[1] - found[0]) // 2


@pytest.mark.parametrize("pattern", ["T", "A", "D"])
def test_of_a_block_its_input_is_held_and_of_an_mlp_its_input(pattern: str):
    x_bytes = 4 * B * T * C
    whole = bytes_held_by_a_layer({}, pattern)
    # The norm's input and statistics, what two linears, GELU and LayerScale get: 1 + 1 + 4 + 4 + 1 of x.
    without_mlp = whole - 11 * x_bytes - 2 * 4 * B * T
    assert bytes_held_by_a_layer({"mlp_tile_tokens": 7}, pattern) == without_mlp + x_bytes
    for less in ({"activation_checkpointing": "full"}, {"activation_checkpointing": "full", "mlp_tile_tokens": 7}):
        assert bytes_held_by_a_layer(less, pattern) == x_bytes < whole / 15


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


def test_without_gradients_nothing_is_kept_or_computed_again():
    tokens, found = drawn_tokens(), []
    model = apply_activation_checkpointing(drawn_model(), activation_checkpointing="full", mlp_tile_tokens=7)
    with torch.no_grad(), held(found, model.parameters()):
        output = model(tokens, labels=tokens)
    assert found == [0]
    assert_close(output.loss, drawn_model()(tokens, labels=tokens).loss.detach(), 1e-12)
