"""The recipes that the project ships are valid, carry the published numbers, and fit the launches they name."""

from pathlib import Path

import pytest

from tost_lm.config import load_config
from tost_lm.data.config import DataPrepConfig
from tost_lm.training.config import PretrainConfig

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.toml")), ids=lambda path: path.stem)
def test_corpora(path: Path):
    assert load_config(DataPrepConfig, path).shards.folder.parts[:2] == ("data", path.stem)


@pytest.mark.parametrize(
    ("size", "weight_decay", "nodes", "override"),
    [
        ("base", 0.01, (2, 3, 4, 6, 12), ["train.micro_batch_sequences=5"]),
        ("medium", 0.1, (2, 3, 4, 6, 12), ["train.micro_batch_sequences=5"]),
        ("large", 0.1, (2, 4, 5, 10), []),
    ],
)
def test_the_papers_recipe(size: str, weight_decay: float, nodes: tuple[int, ...], override: list[str]):
    path = CONFIGS / f"pretrain/owt_tost_{size}.toml"
    config = load_config(PretrainConfig, path)
    optim, train = config.optim, config.train
    assert (optim.lr, optim.min_lr, optim.warmup_steps, optim.beta1, optim.beta2, optim.grad_clip) == (
        6e-4, 6e-5, 2000, 0.9, 0.95, 1.0,
    )  # fmt: skip
    assert (train.steps, train.batch_sequences, train.sequence_tokens, train.dtype) == (600_000, 480, 1024, "bfloat16")
    assert (optim.weight_decay, config.model.preset, config.model.layer_scale) == (weight_decay, f"tost-{size}", 1e-5)
    assert config.model.vocab_size == 50304
    assert config.accumulation(8) >= 1
    assert f"N nodes ({', '.join(map(str, nodes[:-1]))} or {nodes[-1]})" in path.read_text()
    for count in nodes:
        assert load_config(PretrainConfig, path, override).accumulation(8 * count) >= 1
