"""Small models of the Hugging Face library, as the programs find them in a folder."""

from pathlib import Path
from typing import Any


def write_olmo_hybrid(folder: Path, normalizer: Any = None) -> None:
    """Write a model with a byte-level tokenizer, whose logits differ clearly."""
    import torch
    from hf_tokenizers import EOT, byte_level
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    tokenizer = byte_level(normalizer=normalizer)
    torch.manual_seed(0)
    config = OlmoHybridConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=64,
        vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id(EOT), pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    )  # fmt: skip
    _write(OlmoHybridForCausalLM(config), tokenizer, folder)


def write_qwen3_5(folder: Path, dtype: str = "float32", **sizes: Any) -> None:
    """Write a model of odd shape, unless `sizes` say another, with the same tokenizer in shards of 200 MB."""
    import torch
    from hf_tokenizers import EOT, byte_level
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tokenizer = byte_level()
    torch.manual_seed(0)
    odd = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 5, "linear_value_head_dim": 7,
    }  # fmt: skip
    ids = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(EOT), "pad_token_id": None}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**odd, **sizes, **ids}))
    _write(model.to(getattr(torch, dtype)), tokenizer, folder)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    import torch
    from hf_tokenizers import EOT
    from transformers import PreTrainedTokenizerFast

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="200MB")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOT).save_pretrained(folder)
