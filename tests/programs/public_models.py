"""Small models of the Hugging Face library, as the programs find them in a folder."""

import json
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


def write_llama(folder: Path) -> None:
    """Write a model with the same tokenizer, for 8,192 tokens."""
    import torch
    from hf_tokenizers import EOT, byte_level
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8192,
        vocab_size=tokenizer.get_vocab_size(), bos_token_id=None, eos_token_id=tokenizer.token_to_id(EOT),
    )  # fmt: skip
    _write(LlamaForCausalLM(config), tokenizer, folder)


def write_qwen3_5(folder: Path, dtype: str = "float32", **sizes: Any) -> None:
    """Write a model of odd shape, unless `sizes` say another, with the same tokenizer in shards of 200 MB."""
    import torch
    from hf_tokenizers import byte_level

    _write(qwen3_5(**sizes).to(getattr(torch, dtype)), byte_level(), folder)


def qwen3_5(**sizes: Any) -> Any:
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
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**odd, **ids, **sizes}))


def write_with_images(folder: Path, text: Any) -> None:
    """Write a Qwen3.5 of images and texts with this text part, a tokenizer and weights `mtp.*`."""
    import torch
    from hf_tokenizers import EOT, byte_level
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
    settings = {"eos_token_id": 1, "tie_word_embeddings": text.config.tie_word_embeddings}
    vision["out_hidden_size"] = text.config.hidden_size
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, **settings)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.to(text.dtype).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOT).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5"


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    import torch
    from hf_tokenizers import EOT
    from transformers import PreTrainedTokenizerFast

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="200MB")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOT).save_pretrained(folder)
