"""Time and memory of losses for a large vocabulary, by number of tokens.

    python -m benchmarks.loss
    python -m benchmarks.loss shape.width=2048 "bench.lengths=[8192]"

From the input and the weight of the head to the gradients of both. Rivals: torch's linear_cross_entropy in tiles of its
own size and of ours, and whole logits. With the defaults it takes about 6 minutes on 2 CPU cores. Output: one table,
and all values in results/benchmarks/.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import measure
from benchmarks.measure import call_seconds, interleaved_seconds, peak_extra_bytes
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.ops.cross_entropy import linear_cross_entropy, logit_tile_tokens

OURS, TORCH, TORCH_BY_BYTES, WHOLE = "tost_lm", "torch, its tiles", "torch, our tiles", "whole logits"
RIVALS = (OURS, TORCH, TORCH_BY_BYTES, WHOLE)


class LossBenchmarkConfig(Section):
    """Settings of `benchmarks.loss`."""

    shape: measure.HeadShape = measure.HeadShape()
    bench: measure.BenchConfig = measure.BenchConfig(lengths=[1024, 4096, 16384], cell_seconds=240.0)


def run(config: LossBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, shape = config.bench, config.shape
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table(
        "benchmarks.loss", bench, ("forward + backward",), rivals, described, **shape.model_dump()
    )
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n{shape.width} channels, vocabulary {shape.vocab_size:,}, "
        f"{bench.resolved_dtype()}. Time, and peak memory beyond the inputs. Times are medians of rounds in which the "
        "rivals take turns; ¹: a single call. –: failed at fewer tokens."
    )
    return cells, text


main = measure.benchmark("loss", run)


def table_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each number of tokens, a column for each rival."""
    rows: dict[int, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell["tokens"], {"tokens": f"{cell['tokens']:,}"})[cell["rival"]] = described(cell)
    return list(rows.values())


def described(cell: Mapping[str, Any]) -> str:
    """Time and memory of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    once = "¹" if len(cell["seconds"]) == 1 else ""
    return f"{median(cell['seconds']):.3g} s{once}, {cell['peak_bytes'] / 1e9:.2f} GB"


WARM_UP_TOKENS = 64


def one_call(device: str, rival: str, tokens: int, **shape: Any) -> dict[str, Any]:
    """Memory and time of a single call: {"peak_bytes", "seconds": [one]}."""
    prepared(rival, device, WARM_UP_TOKENS, **shape)()
    call = prepared(rival, device, tokens, **shape)
    seconds: list[float] = []
    peak = peak_extra_bytes(lambda: seconds.append(call_seconds(call, device)), device)
    return {"peak_bytes": peak, "seconds": seconds}


def time_in_turns(
    device: str, rivals: dict[str, str], tokens: int, budget_s: float, **shape: Any
) -> dict[str, list[float]]:
    """Seconds of each call of each rival, by name."""
    calls = {name: prepared(name, device, tokens, **shape) for name in rivals}
    return interleaved_seconds(calls, device, budget_s=budget_s)


def prepared(
    rival: str, device: str, tokens: int, *, width: int, vocab_size: int, dtype: str, work: str
) -> Callable[[], None]:
    """The measured call; its inputs exist before it."""
    torch.manual_seed(0)
    x_MC, weight_VC = (
        torch.randn(rows, width, device=device, dtype=getattr(torch, dtype)).mul_(0.1).requires_grad_()
        for rows in (tokens, vocab_size)
    )
    labels_M = torch.randint(vocab_size, (tokens,), device=device)
    loss = _loss(rival, vocab_size, x_MC.dtype)

    def call() -> None:
        loss(x_MC, weight_VC, labels_M).backward()
        x_MC.grad = weight_VC.grad = None

    return call


def _loss(rival: str, words: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if rival == OURS:
        return lambda x, weight, labels: linear_cross_entropy(x, weight, labels)[0]
    if rival == WHOLE:
        return lambda x, weight, labels: functional.cross_entropy(
            functional.linear(x, weight).float(), labels, reduction="sum"
        )
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13 and newer

    tile_tokens = None if rival == TORCH else logit_tile_tokens(words, dtype)
    how = "auto" if rival == TORCH else None
    options = LinearCrossEntropyOptions(batch_chunk_size=tile_tokens, chunking_method=how)
    return lambda x, weight, labels: functional.linear_cross_entropy(
        x, weight, labels, reduction="sum", options=options
    )


if __name__ == "__main__":
    run_program(main, name="benchmarks.loss", doc=__doc__ or "", positional="[CONFIG]", config=LossBenchmarkConfig)
