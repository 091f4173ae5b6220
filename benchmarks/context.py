"""Whether the tasks of the family `context` separate models that can use their context from models that cannot.

    python -m benchmarks.context
    python -m benchmarks.context 'bench.tasks=["copying@text"]' 'bench.patterns=["A", "AA"]'

A small model of each pattern is trained for each task, and measured on examples of another seed: in 32 shots and
random tokens. Texts of context_gain repeat a random passage after more than half of the length.
Output: one table, and all values in results/benchmarks/.
"""

import time
from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic import Field

from benchmarks import measure
from experiments.mqar import draw_model
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.markdown import with_error
from tost_lm.model import ModelConfig, TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig, learning_rate
from tost_lm.tasks.answers import model_scorer, score_cell
from tost_lm.tasks.context import ManyShot
from tost_lm.tasks.haystacks import NOISE, Text
from tost_lm.tasks.queries import Queries, Query
from tost_lm.tasks.registry import make_queries

STEPS = {
    "copying@text": 200,
    "context_gain@text": 200,
    "many_shot_seen@own-words": 600,
    "many_shot_unseen@own-words": 600,
}
"""Training steps for each task."""


class BenchConfig(measure.DeviceConfig):
    """Tasks, models and training."""

    tasks: list[str] = Field(default=list(STEPS), min_length=1)
    """Tasks of the family `context`."""
    patterns: list[str] = Field(default=["D", "T"], min_length=1)
    """The mixers of the layers of each model."""
    width: int = Field(default=128, gt=0)
    """Channels of the models."""
    batch_size: int = Field(default=16, gt=0)
    """Examples of a training step."""
    lr: float = Field(default=4e-3, gt=0)
    """Learning rate after the warm-up."""
    samples: int = Field(default=400, gt=1)
    """Examples of the measurement."""


class ContextBenchmarkConfig(Section):
    """Settings of `benchmarks.context`."""

    bench: BenchConfig = BenchConfig()


def run(config: ContextBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, cells = config.bench, []
    chosen = bench.model_dump(include={"width", "batch_size", "lr", "samples"})
    for task in bench.tasks:
        for pattern in bench.patterns:
            own = {"task": task, "pattern": pattern, "steps": STEPS[task], **chosen}
            function = "benchmarks.context:train_and_measure"
            cells.append(own | measure.run_cell(function, device=device, limit_s=bench.cell_seconds, **own))
            print(described(cells[-1]), flush=True)
    return cells, measure.markdown_table([described(cell) for cell in cells])


main = measure.benchmark("context", run)


def described(cell: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    row = {"task": cell["task"], "layers": cell["pattern"], "steps": f"{cell['steps']:,}"}
    if "failed" in cell:
        return row | dict.fromkeys(("score", "control", "gain over control"), str(cell["failed"]))
    key = "token_accuracy" if cell["task"].endswith("@text") else "choice_accuracy"
    gain = with_error(cell["gain_over_control"], cell["gain_over_control_standard_error"], "+.3f")
    return row | {
        "score": with_error(cell[key], cell[f"{key}_standard_error"], ".1%"),
        "control": with_error(cell[f"control_{key}"], cell[f"control_{key}_standard_error"], ".1%"),
        "gain over control": gain,
    }


SHOTS, COPYING_TOKENS, GAIN_TOKENS, TARGET_TOKENS = 32, 41, 48, 8
PERIOD = 30
"""More than half of GAIN_TOKENS, so the second half does not predict its end."""
TRAINING_SEED, TEXT_SEED, IDS = 1, 2, 64
DOCUMENTS = 4000


def train_and_measure(device: str, task: str, pattern: str, **settings: Any) -> dict[str, Any]:
    """Scores of a model of this pattern after training. `settings`: width, steps, batch_size, lr and samples."""
    tokenizer = word_tokenizer()
    trained, tested = (make_task(task, seed, tokenizer) for seed in (TRAINING_SEED, 0))
    length = length_of(tested)
    tree = {
        "pattern": pattern, "layers": len(pattern), "heads": 2, "width": settings["width"],
        "vocab_size": tokenizer.vocab_size, "max_positions": length, "layer_scale": 0.0, "softmax": {"rope_theta": 0.0},
    }  # fmt: skip
    model = draw_model(validate(ModelConfig, tree, "the model"), seed=0).to(device)
    began = time.monotonic()
    train(model, trained, length, settings["steps"], settings["batch_size"], settings["lr"])
    seconds = time.monotonic() - began
    scorer = model_scorer(model.eval(), tokenizer.vocab_size)
    scores, _ = score_cell(tested, scorer, length, None, settings["samples"])
    return {"length": length, "depth": None, **scores, "seconds": seconds}


@cache
def word_tokenizer() -> Tokenizer:
    """A vocabulary in which the words of the tasks are one or two tokens."""
    plain = SentencePieceTokenizer(train_sentencepiece([NOISE] * 20, 300))
    task = make_task("many_shot_seen@own-words", 0, plain)
    sets = (task.query(length_of(task), None, sample) for sample in range(300))
    texts = [plain.decode(example.prompt.tolist()) for example, _ in sets]
    return SentencePieceTokenizer(train_sentencepiece(texts, 900))


def make_task(name: str, seed: int, tokenizer: Tokenizer) -> Queries:
    """A task whose texts are random tokens, or repeat random passages."""

    def text() -> Text:
        draws = np.random.default_rng(TEXT_SEED + seed)
        ids = tokenizer.vocab_size - IDS + draws.integers(0, IDS, (DOCUMENTS, GAIN_TOKENS))
        if name == "copying@text":
            return Text("random tokens", [ids.ravel()], {})
        return Text("repeated passages", [np.resize(row[:PERIOD], GAIN_TOKENS) for row in ids], {})

    return make_queries(name, tokenizer, text, seed=seed, target_tokens=TARGET_TOKENS)


def length_of(task: Queries) -> int:
    """Tokens of the cell that models are trained for."""
    if isinstance(task, ManyShot):
        return task.frame + SHOTS * task.longest
    return COPYING_TOKENS if task.name == "copying@text" else GAIN_TOKENS


def train(model: TostLM, task: Queries, length: int, steps: int, batch_size: int, lr: float) -> None:
    """Train on the answers of new examples each step; for many shots also on the labels of the shots."""
    config = validate(
        OptimConfig, {"lr": lr, "min_lr": lr / 10, "warmup_steps": 20, "weight_decay": 0.0}, "the training"
    )
    optimizer, device = ADAMW.build(model, config), next(model.parameters()).device
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config)
        numbers = range(step * batch_size, (step + 1) * batch_size)
        rows = [labelled(task, task.query(length, None, number)[0], length) for number in numbers]
        tokens_BT, labels_BT = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*rows, strict=True))
        loss = model(tokens_BT, labels=labels_BT, output_state=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def labelled(task: Queries, example: Query, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of an example, int64 [T] with T = `length`."""
    answer = np.array(example.options[example.right])
    inputs, labels = np.zeros(length, np.int64), np.full(length, IGNORED_LABEL)
    end = len(example.prompt)
    inputs[: end + len(answer)] = np.concatenate([example.prompt, answer])
    labels[end - 1 : end - 1 + len(answer)] = answer
    if isinstance(task, ManyShot):
        is_label = np.isin(inputs[1:end], [ids[-1] for ids in task.labels])
        labels[: end - 1][is_label] = inputs[1:end][is_label]
    return inputs, labels


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.context", doc=__doc__ or "", positional="[CONFIG]", config=ContextBenchmarkConfig
    )
