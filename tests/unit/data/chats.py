"""A tokenizer's folder with a chat template, and conversations."""

import json
from pathlib import Path
from typing import Any

from hf_tokenizers import EOT, byte_level
from transformers import PreTrainedTokenizerFast

KEEPS = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
THINKS = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\\n' + message.reasoning_content | default('') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""As Qwen3's and Qwen3.5's, it removes the thinking of answers that others follow."""


def chat_folder(folder: Path, template: str = KEEPS) -> Path:
    """A folder of the Hugging Face library with a tokenizer and a template."""
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = byte_level()
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    pipeline.add_tokens(["<think>", "</think>"])
    (folder / "tokenizer.json").write_text(pipeline.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOT}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def theirs(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The ids of the library."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)  # pyright: ignore


def conversation(number: int, turns: int) -> list[dict[str, str]]:
    """Questions and answers with thinking, after a system prompt."""
    messages = [{"role": "system", "content": f"They say little. {number}"}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"How many lines has page {number + turn}?"},
            {"role": "assistant", "content": f"It has {turn} lines!\n", "reasoning_content": f"Page {turn}: short"},
        ]
    return messages


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
