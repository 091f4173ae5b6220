"""Peak memory of `tost convert`, to and from a public form, on a model of more than 1 GB in float32."""

from pathlib import Path

import pytest
from programs import peak_memory
from public_models import write_qwen3_5

pytest.importorskip("transformers")

LIMIT = 1.2
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc otherwise keeps freed blocks of less than 32 MB; most matrices of larger models are larger."""
SIZES = {
    "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


CONVERSIONS = {
    "ours": ("", []),
    "back": ("_ours", ["convert.to=qwen3-5"]),
    "like": ("_ours", ["convert.to=qwen3-5", "convert.like={}"]),
}
"""The source's name after its size, and settings with the size of the model."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_directions_need_little_more_than_the_model(dtype: str, tmp_path: Path):
    write_qwen3_5(tmp_path / "small", dtype)
    write_qwen3_5(tmp_path / "large", dtype, **SIZES)
    for name, (source, settings) in CONVERSIONS.items():
        small, large = (
            peak_memory(
                "tost convert", f"{size}{source}", f"convert.folder={size}_{name}",
                *(word.format(size) for word in settings), cwd=tmp_path, **RETURNED,
            )
            for size in ("small", "large")
        )  # fmt: skip
        model = sum(path.stat().st_size for path in (tmp_path / "large_ours").glob("*.safetensors"))
        print(f"{dtype}, {name}: {(large - small) / 1e9:.2f} GB for a model of {model / 1e9:.2f} GB")
        assert model > 1e9
        assert large - small < LIMIT * model
