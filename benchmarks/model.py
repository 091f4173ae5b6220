"""Time and memory of whole models by context length: TSSA, the delta hybrid of the recipes, and softmax attention.

    python -m benchmarks.model
    python -m benchmarks.model "bench.lengths=[1024, 8192]" shape.width=256 shape.layers=4

Two tasks from 1k to 1M tokens, as far as memory and bench.cell_seconds allow: a training step (forward and backward of
one sequence), and decoding one token after a context. The cost of decoding after the longest context is also measured
in turns with that after the shortest. The models have equal layers, heads, width and embeddings, without position
embeddings. With the defaults, a small model, it takes about 10 minutes on 2 CPU cores. Output: one table, and all
values in results/benchmarks/.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import call_seconds, interleaved_seconds, peak_extra_bytes
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.inference.generation import state_bytes
from tost_lm.mixers.softmax.cache import KeyValueState
from tost_lm.model import LMState, ModelConfig, TostLM
from tost_lm.model.config import PRESETS
from tost_lm.model.streaming import TILE_TOKENS, prefill

RIVALS: dict[str, dict[str, Any]] = {
    "TSSA": {"pattern": "T", "positions": "none", "tssa": {"denom_bias": "head"}},
    "delta hybrid": {**PRESETS["delta-350m"], "softmax": {**PRESETS["delta-350m"]["softmax"], "kv_heads": None}},
    "softmax attention": {"pattern": "A", "positions": "none", "layer_scale": 0.0},
}
TRAINING, DECODING = "training step", "decoding a token"
COST_OF_LENGTH = "decoding, longest ÷ shortest"


class ModelBenchmarkConfig(Section):
    """Settings of `benchmarks.model`."""

    shape: measure.ModelShape = measure.ModelShape(layers=4, heads=2, width=64, vocab_size=256)
    """A small vocabulary, so that the head, which is equal in all models, does not hide the mixers."""
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def run(config: ModelBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, shape = config.bench, config.shape
    rivals = {name: {**model, **shape.model_dump()} for name, model in RIVALS.items()}
    for model in rivals.values():
        validate(ModelConfig, model, "benchmarks.model")
    cells = measure.measure_table("benchmarks.model", bench, (TRAINING, DECODING), rivals, described)
    cells += [cell for name, rival in rivals.items() if (cell := cost_of_length(bench, cells, name, rival))]
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n{shape.layers} layers, {shape.heads} heads, width "
        f"{shape.width}, vocabulary {shape.vocab_size}, {bench.resolved_dtype()}, one sequence. Training step: forward "
        "and backward; memory is the peak beyond the weights. Decoding: one token after a context of this many; "
        "memory is the state (of softmax attention the cache, which grows by copying). Times are medians of rounds in "
        "which the rivals take turns; ¹: a single call, too slow for turns. –: failed at a shorter length. ×: time at "
        "the longest context divided by time at the shortest, the median over rounds; and the ratio of state bytes."
    )
    return cells, text


main = measure.benchmark("model", run)


def cost_of_length(
    bench: measure.BenchConfig, cells: Sequence[Mapping[str, Any]], name: str, rival: dict[str, Any]
) -> dict[str, Any] | None:
    """A rival's decoding after the longest and the shortest context, in turns in one process; None: fewer than two
    lengths were measured."""
    mine = [cell for cell in cells if (cell["work"], cell["rival"]) == (DECODING, name) and "failed" not in cell]
    if len(mine) < 2:
        return None
    lengths = [mine[0]["tokens"], mine[-1]["tokens"]]
    cell = measure.run_cell(
        "benchmarks.model:contexts_in_turns", device=bench.resolved_device(), limit_s=2 * bench.cell_seconds,
        lengths=lengths, dtype=bench.resolved_dtype(), rival=rival, budget_s=bench.cell_seconds / 2,
    )  # fmt: skip
    return {"work": COST_OF_LENGTH, "tokens": lengths[1], "shortest_tokens": lengths[0], "rival": name, **cell}


def table_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each work and length, a column for each rival."""
    names = dict.fromkeys(cell["rival"] for cell in cells)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        tokens = f"{cell['tokens']:,}" + (f" ÷ {cell['shortest_tokens']:,}" if "shortest_tokens" in cell else "")
        row = rows.setdefault((cell["work"], tokens), {"": cell["work"], "tokens": tokens, **dict.fromkeys(names, "–")})
        row[cell["rival"]] = described(cell)
    return list(rows.values())


def described(cell: Mapping[str, Any]) -> str:
    """Time and memory of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    if cell["work"] == COST_OF_LENGTH:
        ratio = median(longest / shortest for shortest, longest in zip(*cell["seconds"], strict=True))
        shortest_bytes, longest_bytes = cell["state_bytes"]
        return f"{ratio:.3g}×, {longest_bytes / shortest_bytes:.3g}×"
    once = "¹" if len(cell["seconds"]) == 1 else ""
    memory = cell["peak_bytes"] if cell["work"] == TRAINING else cell["state_bytes"]
    seconds = median(cell["seconds"])
    time = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{time}{once}, {measure.in_units(memory)}"


WARM_UP_TOKENS = 64
TOKENS_IN_ROUND, ROUNDS = 32, 31  # to resolve percents of a ratio near 1, since one token takes milliseconds


def one_call(device: str, work: str, tokens: int, dtype: str, rival: dict[str, Any]) -> dict[str, Any]:
    """Memory and time of a single call, {"peak_bytes", "seconds": [one], "state_bytes" of decoding}."""
    model = _model(rival, device, dtype)
    _prepared(model, work, min(tokens, WARM_UP_TOKENS))[0]()
    model.zero_grad()
    call, state = _prepared(model, work, tokens)
    seconds: list[float] = []
    peak = peak_extra_bytes(lambda: seconds.append(call_seconds(call, device)), device)
    return {"peak_bytes": peak, "seconds": seconds, "state_bytes": state_bytes(state) if state else 0}


def time_in_turns(
    device: str, work: str, tokens: int, dtype: str, rivals: dict[str, dict[str, Any]], budget_s: float
) -> dict[str, list[float]]:
    """Seconds of each call of each rival, by name."""
    calls = {name: _prepared(_model(rival, device, dtype), work, tokens)[0] for name, rival in rivals.items()}
    return interleaved_seconds(calls, device, budget_s=budget_s)


def contexts_in_turns(
    device: str, lengths: list[int], dtype: str, rival: dict[str, Any], budget_s: float
) -> dict[str, Any]:
    """Decoding after contexts of several lengths, in turns in one process: seconds of rounds of tokens, and bytes of
    the state, a row for each length. A pure TSSA model has really read the contexts."""
    model = _model(rival, device, dtype)
    constant = set(model.config.pattern) == {"T"}
    calls, sizes = {}, []
    for tokens in lengths:
        call, state = _prepared(model, DECODING, tokens, really=constant)
        assert state is not None
        calls[str(tokens)] = partial(_repeat, call, TOKENS_IN_ROUND if constant else 1)
        sizes.append(state_bytes(state))
    seconds = interleaved_seconds(calls, device, budget_s=budget_s, repeats=ROUNDS)
    return {"seconds": [seconds[str(tokens)] for tokens in lengths], "state_bytes": sizes}


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _model(rival: dict[str, Any], device: str, dtype: str) -> TostLM:
    torch.manual_seed(0)
    return TostLM(validate(ModelConfig, rival, "benchmark")).to(device, getattr(torch, dtype))


def _prepared(
    model: TostLM, work: str, tokens: int, really: bool = False
) -> tuple[Callable[[], object], LMState | None]:
    """The measured call, and the state before decoding (`really`: after reading the tokens)."""
    device = model.embedding.weight.device
    if work == TRAINING:
        ids_1T = torch.randint(model.config.vocab_size, (1, tokens + 1), device=device)

        def train() -> None:
            model(ids_1T[:, :-1], labels=ids_1T[:, 1:]).loss.backward()
            model.zero_grad()

        return train, None
    state = _state_of_reading(model, tokens) if really else _state_after(model, tokens)
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def decode() -> Tensor:
        return model(token_11, state=state).logits

    return decode, state


def _state_of_reading(model: TostLM, tokens: int) -> LMState:
    lengths = [min(TILE_TOKENS, tokens - start) for start in range(0, tokens, TILE_TOKENS)]
    state = prefill(model, (torch.randint(model.config.vocab_size, (1, length)) for length in lengths)).state
    assert state is not None
    return state


@torch.inference_mode()
def _state_after(model: TostLM, tokens: int) -> LMState:
    """A state as after this many tokens. Keys and values are drawn: computing them would take quadratic time, and their
    values do not affect the time."""
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.embedding.weight.device)
    state = model(token_11, state=model(token_11).state).state  # statistics in the precision of decoding
    layers = []
    for layer in state.layers:
        if isinstance(layer, KeyValueState):
            _, H, _, D = layer.key.shape
            layers.append(KeyValueState(*(layer.key.new_empty(1, H, tokens, D).normal_() for _ in range(2))))
        else:
            layers.append(layer)
    return LMState(tuple(layers), (tokens,))


if __name__ == "__main__":
    run_program(main, name="benchmarks.model", doc=__doc__ or "", positional="[CONFIG]", config=ModelBenchmarkConfig)
