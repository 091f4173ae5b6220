"""Compiled blocks: one graph for each kind of layer, the same numbers, and no new graph for other documents."""

import gc
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from other_forms import other_forms
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.library import opcheck

from tost_lm import torch_internals
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.mixers.delta.layer import DELTA_RULE
from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.softmax.layer import ATTENTION
from tost_lm.mixers.tssa.layer import TSSA
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.ops import registered
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.short_conv import CONVOLUTION
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
def test_a_block_is_one_graph_with_the_same_gradients(pattern: str, settings: dict[str, Any], rows: str):
    expected = loss_and_gradients(drawn_model(pattern, **settings), ROWS[rows], with_states=False)
    model = compile_blocks(drawn_model(pattern, **settings))
    found = loss_and_gradients(model, ROWS[rows], with_states=False)
    assert graphs() == len(pattern)  # of two layers of each kind
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_states_in_and_out_have_the_same_gradients(rows: str):
    expected = loss_and_gradients(drawn_model("TDA"), ROWS[rows], with_states=True)
    found = loss_and_gradients(compile_blocks(drawn_model("TDA")), ROWS[rows], with_states=True)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not counters["graph_break"]


def test_other_documents_and_other_tokens_need_no_new_graph():
    model = compile_blocks(drawn_model("TDA"))
    for cuts in ([0, 7, T], [0, 1, 2, 30, T], [0, T]):
        loss_and_gradients(model, {"cu_seqlens": torch.tensor(cuts)}, with_states=False)
    assert graphs() == 3
    with torch.no_grad():
        model(TOKENS_BT[:1])
    assert graphs() == 6


@pytest.mark.parametrize("pattern", "TDA")
def test_graphs_compute_nothing_on_the_host(pattern: str, monkeypatch: pytest.MonkeyPatch):
    """Only handles are there. An operation on one would need a C++ compiler on each GPU machine, and its time."""
    nodes: list[Any] = []

    def collect(graph: Any, _: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(torch_internals, "_compile_for_any_address", aot_autograd(fw_compiler=collect))
    loss_and_gradients(compile_blocks(drawn_model(pattern)), ROWS["packed"], with_states=False)
    computed = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert any("tost_lm.backward" in str(node.target) for node in computed)
    assert not [node for node in computed if getattr(node.meta["val"], "dtype", None) == torch.int64]


@pytest.mark.parametrize(
    "less", [{"activation_checkpointing": "full"}, pytest.param({"mlp_tile_tokens": 7}, marks=pytest.mark.slow)]
)
def test_blocks_that_are_computed_again_have_the_same_gradients(less: dict[str, Any]):
    expected = loss_and_gradients(drawn_model("TDA"), {}, with_states=False)
    model = compile_blocks(apply_activation_checkpointing(drawn_model("TDA"), **less))
    found = loss_and_gradients(model, {}, with_states=False)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12, name)
    assert not counters["graph_break"]


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
    assert not counters["graph_break"]


def cases(wanted: str = "") -> dict[str, tuple[registered.Registered, list[Any], list[str]]]:
    """Tensors and options of each operator, which returns no states or those of all documents."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    H, D, C = 2, 4, 8
    keys = [drawn(1, T, H, D) for _ in range(3)]
    rates = [-torch.rand(1, T, H).double(), torch.rand(1, T, H).double()]
    return {
        "causal_tssa": (TSSA, [drawn(1, T, H, D), drawn(H), drawn(H, 2 * T), *[None] * 4], [wanted, ""]),
        "short_conv": (CONVOLUTION, [drawn(1, T, C), drawn(C, 3), None, None], [wanted]),
        "delta_rule": (DELTA_RULE, [*keys, *rates, None, None], [wanted]),
        "softmax_attention": (ATTENTION, [*(drawn(1, H, T, D) for _ in range(3)), *[None] * 3], ["5", wanted]),
    }


def arguments(tensors: list[Any], options: list[str], offsets: Tensor | None = None) -> tuple[Any, ...]:
    """Called as a graph calls the operator; with states if documents are packed."""
    info = SequenceInfo.of(TOKENS_BT[:1], None, offsets, output_state=offsets is not None)
    tensors = [*tensors[:-1], info.state_offsets]
    given = [x for x in tensors if x is not None]
    differentiated = [x.requires_grad for x in given]
    return given, info.handle, [x is not None for x in tensors], differentiated, options


@pytest.mark.parametrize("name", cases())
def test_operators_pass_the_checks_of_torch(name: str):
    call = getattr(torch.ops.tost_lm, name).default
    operator, tensors, options = cases()[name]
    assert operator.operator._qualname == f"tost_lm::{name}"
    opcheck(call, arguments(tensors, options))
    opcheck(call, arguments(*cases("True")[name][1:], torch.tensor([0, 7, 8, T])), test_utils="test_faketensor")


@pytest.mark.parametrize("name", cases())
def test_a_waiting_pass_reads_nothing_that_the_graph_may_overwrite(name: str):
    _, tensors, options = cases()[name]
    given, handle, are_given, differentiated, options = arguments(tensors, options)
    operator = getattr(torch.ops.tost_lm, name)
    expected_results = operator(given, handle, are_given, differentiated, options)[:-1]
    inputs = [x for x, needed in zip(given, differentiated, strict=True) if needed]
    gradients = [torch.randn_like(x) for x in expected_results if x.requires_grad]
    results_with_gradient = [x for x in expected_results if x.requires_grad]
    expected = torch.autograd.grad(results_with_gradient, inputs, gradients)

    with torch.no_grad():
        *results, waiting = operator(given, handle, are_given, differentiated, options)
        in_graph = [x.clone() for x in (*given, *results)]
        for x in (*given, *results):
            x.fill_(x.new_tensor(float("nan")) if x.is_floating_point() else 0)
        needed = [*differentiated, *(False for _ in results), False]
        has_gradient = [x.requires_grad for x in expected_results]
        found = torch.ops.tost_lm.backward(waiting, gradients, has_gradient, in_graph, needed[:-1])
    for x, value in zip(found, expected, strict=True):
        assert torch.equal(x, value)


def waiting_passes() -> int:
    gc.collect()
    return sum(isinstance(x, registered._Pass) for x in gc.get_objects())


@pytest.mark.slow
def test_what_a_handle_stands_for_is_freed_with_it():
    torch.compiler.reset()
    gc.collect()  # models of other tests
    before = len(registered._OBJECTS), waiting_passes()
    model = compile_blocks(apply_activation_checkpointing(drawn_model("TD"), activation_checkpointing="full"))
    for _ in range(2):
        loss_and_gradients(model, {}, with_states=True)  # forwards that are computed again have no backward
    model(TOKENS_BT, labels=TOKENS_BT)
    torch.compiler.reset()
    assert (len(registered._OBJECTS), waiting_passes()) == before


@pytest.mark.slow
def test_a_decoded_token_has_the_same_state():
    for pattern in ("T", "D", "A"):
        eager, model = drawn_model(pattern).float(), compile_blocks(drawn_model(pattern).float())
        after, compiled = (m(TOKENS_BT[:, :1], state=m(TOKENS_BT).state).state for m in (eager, model))
        for x, expected in zip(compiled.layers[0], after.layers[0], strict=True):
            assert x.dtype == expected.dtype
            assert_close(x, expected, 1e-6)


def test_the_softmax_of_tensor_ranks_is_not_left_out_of_a_graph():
    model = drawn_model("T")
    mixer: Any = model.blocks[0].mixer
    mixer.softmax = HeadSoftmax()
    with pytest.raises(Exception, match=r"torch\.compile does not support tensor ranks"):
        compile_blocks(model)(TOKENS_BT)


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
