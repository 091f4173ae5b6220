"""Time of zero-shot scoring, compared with one model call per request, and with lm-evaluation-harness.

    python -m benchmarks.evaluation bench.gpt2=gpt2 sets.lambada_openai=lambada_test.jsonl \\
      sets.wikitext2=wiki.test.raw

The first passages of LAMBADA (lambada_openai@lm-eval) and the first pages of WikiText-2 (wikitext2@lm-eval), from text
to scores. A TSSA model runs in our scorer and one request at a time. GPT-2 of the same shape runs in our scorer and in
the harness's own class for Hugging Face models (which needs accelerate). Weights are drawn, which changes no time.
`at best` is the ratio that a scorer of only the necessary matrix products would reach. Output: one table, and all
values in results/benchmarks/.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch.nn.functional import linear

from benchmarks import measure
from benchmarks.measure import interleaved_seconds
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.hf import hf_tokenizer
from tost_lm.inference.generation import LanguageModel
from tost_lm.inference.likelihood import BATCH_TOKENS, score_requests
from tost_lm.inference.requests import Request
from tost_lm.model import ModelConfig, TostLM
from tost_lm.tasks.data_sets import DATA_SETS, Sets
from tost_lm.tasks.missing_word import passages
from tost_lm.tasks.perplexity import detokenized_wikitext, pages
from tost_lm.tasks.registry import find_task
from tost_lm.tasks.scored import ScoredTask

OURS, ONE_BY_ONE, HARNESS = "tost_lm", "one by one, whole logits", "lm-evaluation-harness"
PRODUCTS = "products alone"


class ShapeConfig(Section):
    """Shape of both models."""

    layers: int = Field(default=12, gt=0)
    """Blocks."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    width: int = Field(default=768, gt=0)
    """Channels."""
    max_positions: int = Field(default=1024, gt=0)
    """Tokens of a window."""


class BenchConfig(measure.DeviceConfig):
    """Examples, rounds and tokenizer."""

    gpt2: Path
    """Folder of GPT-2's tokenizer, as of the Hugging Face hub."""
    passages: int = Field(default=60, gt=0)
    """Passages of LAMBADA."""
    pages: int = Field(default=2, gt=0)
    """Pages of WikiText-2."""
    rounds: int = Field(default=5, gt=0)
    """Timed calls of each kind, in turns."""


class EvaluationBenchmarkConfig(Section):
    """Settings of `benchmarks.evaluation`."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    sets: Sets = Field(default_factory=dict)
    """The files of test sets by name, in their published format."""
    bench: BenchConfig


def run(config: EvaluationBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench = config.bench
    cells = []
    with TemporaryDirectory() as folder:
        for task in ("lambada_openai@lm-eval", "wikitext2@lm-eval"):
            data_set = task.split("@")[0]
            whole, file = DATA_SETS[data_set].find_file(config.sets).path, Path(folder, data_set)
            if data_set == "lambada_openai":
                examples, texts = bench.passages, [json.dumps({"text": text}) for text in passages(whole)]
            else:
                examples, texts = bench.pages, list(pages(whole))
            file.write_text("\n".join(texts[:examples]))
            for model in ("tost", "gpt2"):
                cell = measure.run_cell(
                    f"benchmarks.evaluation:{model}", device=device, limit_s=bench.cell_seconds,
                    task=task, file=str(file), gpt2=str(bench.gpt2.absolute()), rounds=bench.rounds,
                    shape=config.shape.model_dump(),
                )  # fmt: skip
                cells.append({"task": task, "examples": examples, "of": model, **cell})
                print("; ".join(f"{key} {value}" for key, value in table_row(cells[-1]).items()), flush=True)
    shape = config.shape
    text = (
        f"{measure.markdown_table([table_row(cell) for cell in cells])}\n\n{shape.layers} layers, {shape.heads} heads, "
        f"width {shape.width}, vocabulary 50,304 (GPT-2: 50,257), windows of {shape.max_positions:,} tokens, float32. "
        f"Medians of {bench.rounds} rounds in turns; ratios are medians over rounds. At best: only the matrix "
        "products of the layers, and of the head where a token is scored."
    )
    return cells, text


main = measure.benchmark("evaluation", run)


def table_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table."""
    row = {
        "task": cell["task"],
        "model": {"tost": "TSSA", "gpt2": "GPT-2"}[cell["of"]],
        "examples": f"{cell['examples']:,}",
    }
    if "failed" in cell:
        columns = ("tokens", "rival", OURS, "the rival's", "ratio", "at best")
        return {**row, **dict.fromkeys(columns, "–"), "rival": cell["failed"]}
    seconds: dict[str, list[float]] = cell["seconds"]
    rival = next(name for name in seconds if name not in (OURS, PRODUCTS))
    return {
        **row,
        "tokens": f"{cell['tokens']:,}",
        "rival": rival,
        OURS: f"{median(seconds[OURS]):.3g} s",
        "the rival's": f"{median(seconds[rival]):.3g} s",
        "ratio": _ratio(seconds[rival], seconds[OURS]),
        "at best": _ratio(seconds[rival], seconds[PRODUCTS]) if PRODUCTS in seconds else "–",
    }


def _ratio(rival: Sequence[float], ours: Sequence[float]) -> str:
    return f"{median(a / b for a, b in zip(rival, ours, strict=True)):.2f}"


VOCAB_SIZE = 50304


def tost(device: str, shape: dict[str, int], **call: Any) -> dict[str, Any]:
    """Our scorer beside one call per request with all logits."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate({**shape, "pattern": "T", "vocab_size": VOCAB_SIZE})
    model, tokenizer = (
        TostLM(config).to(device).eval(),
        hf_tokenizer(Path(call["gpt2"]) / "tokenizer.json", "<|endoftext|>", "none"),
    )
    requests = _requests(tokenizer, config.max_positions, **call)
    nats: dict[str, np.ndarray] = {}

    def ours() -> None:
        nats[OURS] = score_requests(model, _requests(tokenizer, config.max_positions, **call)).nats

    def one_by_one() -> None:
        found = _requests(tokenizer, config.max_positions, **call)
        nats[ONE_BY_ONE] = np.array([_whole_logits(model, request, device) for request in found])

    calls = {OURS: ours, ONE_BY_ONE: one_by_one, PRODUCTS: _products(model, requests, device)}
    seconds = interleaved_seconds(calls, device, budget_s=float("inf"), repeats=call["rounds"])
    np.testing.assert_allclose(nats[OURS], nats[ONE_BY_ONE], rtol=1e-4)
    return {"tokens": _tokens(requests), "seconds": seconds}


def gpt2(device: str, shape: dict[str, int], **call: Any) -> dict[str, Any]:
    """Our scorer beside the harness's, with the same GPT-2 and texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    from tost_lm.inference.hugging_face import HuggingFaceLM, HuggingFaceTokenizer

    torch.manual_seed(0)
    positions = shape["max_positions"]
    settings = GPT2Config(n_layer=shape["layers"], n_head=shape["heads"], n_embd=shape["width"], n_positions=positions)
    model: Any = GPT2LMHeadModel(settings)
    model.to(device).eval()
    theirs: Any = GPT2Tokenizer.from_pretrained(call["gpt2"])
    ours, tokenizer = HuggingFaceLM(model), HuggingFaceTokenizer(theirs, "")
    requests = _requests(tokenizer, positions, **call)
    longest = max(request.inputs for request in requests)
    harness_class: Any = HFLM
    harness = harness_class(
        pretrained=model, tokenizer=theirs, batch_size=max(1, BATCH_TOKENS[device] // longest), device=device
    )
    if call["task"].startswith("lambada"):
        kind, texts = "loglikelihood", [_split(text) for text in passages(Path(call["file"]))]
    else:
        kind, texts = "loglikelihood_rolling", [(detokenized_wikitext(page),) for page in pages(Path(call["file"]))]
    instances = [Instance(kind, {}, text, number) for number, text in enumerate(texts)]
    totals: dict[str, float] = {}

    def by_ours() -> None:
        totals[OURS] = float(score_requests(ours, _requests(tokenizer, positions, **call)).nats.sum())

    def by_harness() -> None:
        found = getattr(harness, kind)(instances, disable_tqdm=True)
        totals[HARNESS] = -sum(one[0] if isinstance(one, tuple) else one for one in found)

    seconds = interleaved_seconds(
        {OURS: by_ours, HARNESS: by_harness}, device, budget_s=float("inf"), repeats=call["rounds"]
    )
    np.testing.assert_allclose(totals[OURS], totals[HARNESS], rtol=1e-5)
    return {"tokens": _tokens(requests), "seconds": seconds}


def _requests(tokenizer: Tokenizer, window: int, *, task: str, file: str, **_: Any) -> list[Request]:
    scored = find_task(task)[1]
    assert isinstance(scored, ScoredTask)
    found = scored.examples(Path(file), tokenizer, window)
    return [request for example in found for request in example.requests]


def _split(text: str) -> tuple[str, str]:
    context, word = text.rsplit(" ", 1)
    return context, f" {word}"


def _tokens(requests: list[Request]) -> int:
    return sum(request.inputs for request in requests)


@torch.inference_mode()
def _whole_logits(model: LanguageModel, request: Request, device: str) -> float:
    ids = torch.from_numpy(np.concatenate(request)).to(device)
    logits_TV = model(ids[None, :-1]).logits[0]
    nats_T = -torch.log_softmax(logits_TV.float(), -1).gather(1, ids[1:, None])[:, 0]
    return float(nats_T[len(request.context) - 1 :].double().sum())


@torch.inference_mode()
def _products(model: TostLM, requests: list[Request], device: str) -> Callable[[], None]:
    """Only the matrix products: of the layers at each token, and of the head at each target."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    batch, tokens = BATCH_TOKENS[device], _tokens(requests)
    inputs = {width: torch.randn(batch, width, device=device) for width in {weight.shape[1] for weight in weights}}
    head, targets = model.embedding.weight, sum(len(request.target) for request in requests)

    @torch.inference_mode()
    def multiply() -> None:
        for count, weights_here in ((tokens, weights), (targets, [head])):
            for begin in range(0, count, batch):
                for weight in weights_here:
                    linear(inputs[weight.shape[1]][: min(batch, count - begin)], weight)

    return multiply


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.evaluation", doc=__doc__ or "", positional="[CONFIG]", config=EvaluationBenchmarkConfig
    )
