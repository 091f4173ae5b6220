"""The model in the Hugging Face library: importing this registers it with AutoConfig and AutoModelForCausalLM.

    import tost_lm.interop.hf
    tost_lm.interop.hf.export("runs/demo", "demo-hf")
    model = AutoModelForCausalLM.from_pretrained("demo-hf")
    tokenizer = AutoTokenizer.from_pretrained("demo-hf")
    model.generate(**tokenizer(["Once", "A long time ago"], padding=True, return_tensors="pt"), max_new_tokens=64)

The exported tokenizer starts every text with the end-of-text token. The model is `TostLM`; its cache is the state of
`TostLM`, of constant size for TSSA layers.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tost_lm.interop.hf needs transformers ({error}): pip install 'tost-lm[hf]'", name=error.name
    ) from None

from tost_lm.interop.hf.cache import TostCache
from tost_lm.interop.hf.export import export
from tost_lm.interop.hf.model import TostConfig, TostForCausalLM

__all__ = ["TostCache", "TostConfig", "TostForCausalLM", "export"]

AutoConfig.register(TostConfig.model_type, TostConfig)
AutoModelForCausalLM.register(TostConfig, TostForCausalLM)
