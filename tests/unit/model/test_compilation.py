"""Compiled blocks: the graphs of each kind of layer, the same numbers, and no new graph for other documents."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_breaks import other_graph_breaks
from other_forms import other_forms
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tost_lm import torch_internals
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.pretrain.tiled import tiled_backward
from tost_lm.testing import assert_close

B, T, VOCAB = 2, 40, 64
TOKENS_BT = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(1))
INDUCTOR = torch_internals._compile_for_any_address
ROWS = {"unpacked": {}, "packed": {"cu_seqlens": torch.tensor([0, 7, 8, 31, T])}}


@pytest.fixture(autouse=True)
def graphs_without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same graphs run by PyTorch's own kernels: compiling for the processor takes many times as long."""
    monkeypatch.setattr(torch_internals, "_compile_for_any_address", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def drawn_model(pattern: str, **settings: Any) -> TostLM:
    torch.manual_seed(0)
    shape = {"layers": 2 * len(pattern), "heads": 4, "width": 32, "vocab_size": VOCAB, "max_positions": 2 * T}
    window = {"softmax": {"window": 5}} if "A" in pattern else {}
    config = {"pattern": pattern, "layer_scale": 1.0, **shape, **window, **settings}
    model = TostLM(validate(ModelConfig, config, "test")).double()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("denom_bias"):
            nn.init.normal_(parameter, 0.5, 0.1)
    return model


def loss_and_gradients(model: TostLM, rows: dict[str, Any], *, with_states: bool) -> dict[str, Tensor]:
    """With states, of a second call that starts from the states of a first one."""
    tokens_BT = TOKENS_BT[:1] if rows else TOKENS_BT
    output = model(tokens_BT, labels=tokens_BT, output_state=with_states, **rows)
    loss = output.loss
    if with_states:
        output = model(tokens_BT, labels=tokens_BT, state=output.state, **rows)
        statistics = [x for layer in output.state.layers for x in layer if x.is_floating_point()]
        loss = loss + output.loss + sum(x.square().mean() for x in statistics)
    names, parameters = zip(*model.named_parameters(), strict=True)
    # Of a loss without states, no gradient reaches some parameters.
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return {"loss": loss, **dict(zip(names, gradients, strict=True))}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("rows", [pytest.param("unpacked", marks=pytest.mark.slow), "packed"])
@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        pytest.param("T", {}, marks=pytest.mark.quick),
        ("TDA", {}),
        ("A", other_forms(window=5, conv=True)),
    ],
)
def test_blocks_of_a_kind_share_graphs_with_the_same_gradients(pattern: str, settings: dict[str, Any], rows: str):
    expected = loss_and_gradients(drawn_model(pattern, **settings), ROWS[rows], with_states=False)
    one_of_each = compile_blocks(drawn_model(pattern, **settings, layers=len(pattern)))
    loss_and_gradients(one_of_each, ROWS[rows], with_states=False)
    known, model = graphs(), compile_blocks(drawn_model(pattern, **settings))
    found = loss_and_gradients(model, ROWS[rows], with_states=False)
    assert graphs() == known > 0
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not other_graph_breaks()


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_states_in_and_out_have_the_same_gradients(rows: str):
    expected = loss_and_gradients(drawn_model("TDA"), ROWS[rows], with_states=True)
    found = loss_and_gradients(compile_blocks(drawn_model("TDA")), ROWS[rows], with_states=True)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not other_graph_breaks()


def test_other_documents_need_no_new_graph():
    model, known = compile_blocks(drawn_model("TDA")), list[int]()
    for cuts in ([0, 7, T], [0, 1, 2, 30, T], [0, T]):
        loss_and_gradients(model, {"cu_seqlens": torch.tensor(cuts)}, with_states=False)
        known.append(graphs())
    assert known[0] == known[-1] > 0


@pytest.mark.parametrize(
    "less", [{"activation_checkpointing": "full"}, pytest.param({"mlp_tile_tokens": 7}, marks=pytest.mark.slow)]
)
def test_blocks_that_are_computed_again_have_the_same_gradients(less: dict[str, Any]):
    expected = loss_and_gradients(drawn_model("TDA"), {}, with_states=False)
    model = compile_blocks(apply_activation_checkpointing(drawn_model("TDA"), **less))
    found = loss_and_gradients(model, {}, with_states=False)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not other_graph_breaks()


@pytest.mark.parametrize("window", [5, 0])
def test_tiles_have_the_same_gradients(window: int):
    """Without a window, a softmax layer itself is outside of graphs."""

    def of_tiles(model: TostLM) -> dict[str, Tensor]:
        model.zero_grad()
        loss = tiled_backward(model, TOKENS_BT, TOKENS_BT, tile_tokens=20)
        return {"loss": loss} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    softmax = {"window": window}
    expected = of_tiles(drawn_model("DA", softmax=softmax))
    model = compile_blocks(drawn_model("DA", softmax=softmax))
    found, known = of_tiles(model), graphs()
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    of_tiles(model)
    assert graphs() == known > 0
    assert not other_graph_breaks()


@pytest.mark.slow
def test_a_decoded_token_has_the_same_state():
    for pattern in ("T", "D", "A"):
        eager, model = drawn_model(pattern).float(), compile_blocks(drawn_model(pattern).float())
        after, compiled = (m(TOKENS_BT[:, :1], state=m(TOKENS_BT).state).state for m in (eager, model))
        for x, expected in zip(compiled.layers[0], after.layers[0], strict=True):
            assert x.dtype == expected.dtype
            assert_close(x, expected, 1e-6)


@pytest.mark.slow
def test_code_in_a_folder_that_others_can_write_is_not_used(tmp_path: Path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "USER": "me", "LOGNAME": "me"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    others = tmp_path / "torchinductor_me"
    others.mkdir()
    others.chmod(0o777)
    script = (
        "import torch\nfrom tost_lm.config import validate\nfrom tost_lm.model import ModelConfig, TostLM\n"
        "from tost_lm.model.transforms import compile_blocks\n"
        "tree = {'layers': 1, 'heads': 1, 'width': 4, 'vocab_size': 8, 'max_positions': 8}\n"
        "compile_blocks(TostLM(validate(ModelConfig, tree, 'test')))(torch.zeros(1, 4, dtype=torch.int64))"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert list(others.iterdir()) == []
    (own,) = (path for path in tmp_path.glob("torchinductor_*") if path != others)
    assert own.stat().st_mode & 0o077 == 0
    assert list(own.rglob("*.so"))


def test_without_a_compiler_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler such as g\+\+; install it, or set train.compile = false"):
        compile_blocks(drawn_model("T"))


@pytest.mark.slow
def test_addresses_of_parameters_are_checked_in_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Blocks share code, but in DeepSpeed's buffers some of their parameters are at no multiple of 16 bytes. Inductor
    checks addresses on GPUs only, so here it takes the CPU for one."""
    from torch._inductor import compile_fx, utils

    graphs: list[tuple[int, int]] = []
    find = compile_fx.get_input_idxs_to_check

    def counted(inputs: Any, static_input_idxs: Any) -> Any:
        found = find(inputs, static_input_idxs)
        graphs.append((len(found), len(inputs)))
        return found

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_fx, "is_gpu", lambda device: True)
    monkeypatch.setattr(compile_fx, "should_assume_input_aligned", utils.tensor_is_aligned)
    monkeypatch.setattr(compile_fx, "get_input_idxs_to_check", counted)
    monkeypatch.setattr(torch_internals, "_compile_for_any_address", INDUCTOR)
    scale = nn.Parameter(torch.ones(8))
    scaled = torch_internals.compiled(lambda x: (x * scale).sin())
    scaled(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert graphs == [(2, 2), (3, 3)]  # forward, backward
