"""Qwen3, dense: as Llama, with a norm of each head of queries and keys."""

from tost_lm.interop.public_form import PublicForm
from tost_lm.interop.public_layers import ATTENTION, QK_NORM

FORM = PublicForm(
    "Qwen3", ("qwen3",), "Qwen3Config", "Qwen3ForCausalLM",
    blocks={"A": {**ATTENTION, **QK_NORM}}, sizes={"softmax.head_size": "head_dim"}, settings={"softmax.qk_norm": True},
)  # fmt: skip
