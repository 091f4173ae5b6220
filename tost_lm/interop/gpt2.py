"""GPT-2: softmax attention, learned positions and biases. It is read only: no recipe trains a model of this form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tost_lm.errors import CheckpointError
from tost_lm.interop.authors import PREFIX, gpt2_name
from tost_lm.interop.public_form import PublicForm
from tost_lm.model import ModelConfig
from tost_lm.model.lm import parameter_shapes

GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}


class _Gpt2(PublicForm):
    """As other forms, but its projections are [in, out], and its GELU is one of two."""

    def our_settings(self, theirs: Any, where: Path) -> ModelConfig:
        if (activation := theirs.activation_function) not in GELU:
            raise CheckpointError(
                f"{where}: unsupported activation_function: {activation!r}; give a model with {' or '.join(GELU)}"
            )
        return super().our_settings(theirs, where).model_copy(update={"gelu": GELU[activation]})

    def our_weights(self, config: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for name in parameter_shapes(config):
            weight = theirs[PREFIX + gpt2_name(name)][:]
            found[name] = weight.T.contiguous() if name.endswith("_proj.weight") else weight
        return found


GPT2 = _Gpt2(
    "GPT-2", ("gpt2",), "GPT2Config", "GPT2LMHeadModel",
    blocks={"A": {}},
    sizes={
        "mlp_hidden": "n_inner", "norm_epsilon": "layer_norm_epsilon", "max_positions": "n_positions",
        "softmax.kv_heads": "n_head",
    },
    settings={"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    fixed={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    without_rotary={"rope_theta": None}, prefix=PREFIX,
)  # fmt: skip
FORMAT = GPT2.format._replace(write=None)
