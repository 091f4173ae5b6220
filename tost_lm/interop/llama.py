"""Llama, the form of Llama 3, SmolLM2 and others: softmax attention with a rotary embedding."""

from tost_lm.interop.public_form import PublicForm
from tost_lm.interop.public_layers import ATTENTION

FORM = PublicForm(
    "Llama", ("llama",), "LlamaConfig", "LlamaForCausalLM",
    blocks={"A": ATTENTION}, sizes={"softmax.head_size": "head_dim"},
)  # fmt: skip
