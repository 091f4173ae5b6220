"""Task `text@bpb` reads 2,097,152 tokens: flat memory, and the same result on 1 and 4 ranks."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import peak_memory

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.model import ModelConfig, TostLM
from tost_lm.testing import FLOAT32_REORDERED

SHORT, LONG = 1 << 16, 1 << 21
GROWTH = 1.05
SHAPE = {
    "pattern": "TDDA", "softmax": {"window": 256}, "layers": 4, "heads": 4, "width": 64, "max_positions": 1024,
    "positions": "none", "tssa": {"denom_bias": "head"}, "layer_scale": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and texts of at least SHORT and LONG tokens."""
    if not pytestconfig.getoption("--full"):
        pytest.skip("minutes: pytest --full")
    folder = tmp_path_factory.mktemp("long")
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randrange(2, 9))) for _ in range(1000)]
    lines = [" ".join(draws.choices(words, k=2000)) + ".\n" for _ in range(20)]
    tokenizer = SentencePieceTokenizer(train_sentencepiece(lines, 600))
    for tokens in (SHORT, LONG):
        write_text(folder / f"{tokens}.txt", tokenizer, words, draws, tokens)
    torch.manual_seed(0)
    config = validate(ModelConfig, {**SHAPE, "vocab_size": tokenizer.vocab_size}, "test")
    model = TostLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.endswith("denom_bias"):
                parameter.mul_(10)  # so that earlier tokens matter
    write_checkpoint(folder / "model", config, model.state_dict(), tokenizer)
    return folder


def write_text(path: Path, tokenizer: Tokenizer, words: list[str], draws: random.Random, tokens: int) -> None:
    written = 0
    with path.open("w") as file:
        while written < tokens:
            line = " ".join(draws.choices(words, k=2000)) + ".\n"
            file.write(line)
            written += len(tokenizer.encode(line))


def measure(folder: Path, tokens: int, ranks: int) -> tuple[int, dict[str, Any]]:
    """Peak memory in bytes of the largest process, and the result, which is removed."""
    peak = peak_memory("tost eval", "model", "text", f"text.file={tokens}.txt", f"launch.ranks={ranks}", cwd=folder)
    path = folder / "model/eval/text@bpb/results.json"
    results = json.loads(path.read_text())
    path.unlink()
    return peak, results


@pytest.mark.timeout(3600)
def test_memory_is_flat_and_ranks_do_not_change_the_result(folder: Path):
    nats = {}
    for ranks in (1, 4):
        short, _ = measure(folder, SHORT, ranks)
        long, results = measure(folder, LONG, ranks)
        nats[ranks], tokens = results["model"]["nats"], results["model"]["tokens"]
        print(
            f"{ranks} ranks: {tokens:,} tokens, {results['seconds']:.0f} s, {results['model']['nats_per_token']:.6f} "
            f"nats/token, {long / 1e6:.0f} MB (65,536 tokens: {short / 1e6:.0f} MB), {long / short:.3f} ×"
        )
        assert tokens >= LONG
        assert long < GROWTH * short
    assert nats[4] == pytest.approx(nats[1], rel=FLOAT32_REORDERED)
