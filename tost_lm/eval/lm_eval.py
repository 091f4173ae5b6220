"""A checkpoint as a model of lm-evaluation-harness. Importing this module registers it there as `tost_lm`.

    import tost_lm.eval.lm_eval
    from lm_eval import simple_evaluate
    simple_evaluate(model="tost_lm", model_args="pretrained=runs/demo", tasks=["lambada_openai"])

It is the harness's own class for models of the Hugging Face library, with the model and the tokenizer that
`tost_lm.interop.hf.export` writes. The end-of-text token stands only before a text without context.
"""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from tost_lm.checkpointing.format import read_model_config
from tost_lm.config import path_or_url
from tost_lm.errors import ConfigError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.generation import not_finite
from tost_lm.interop.hf import TostConfig, TostForCausalLM, fast_tokenizer

HuggingFaceModel: Any = HFLM


class HarnessModel(HuggingFaceModel):
    """A model that scores and generates texts for the harness."""

    def __init__(
        self,
        pretrained: str = "",
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        device: str = "cuda:0",
        max_length: int | None = None,
        tokenizer: str = "",
        **others: object,
    ) -> None:
        """The arguments are those of the harness's --model_args, --batch_size, --max_batch_size and --device.

        Args:
            pretrained: a run folder, a step folder or an export.
            batch_size: number of texts that are read at once; `auto`: as many as fit the memory, at most
                `max_batch_size`.
            device: one that does not exist: the CPU.
            max_length: tokens of a window; a longer context loses its beginning. None: the tokens that the model was
                trained to read at once.
            tokenizer: is not read here; tasks such as RULER size their texts by this tokenizer of the Hugging Face
                library.

        Raises:
            CheckpointError, DataError: the checkpoint or its tokenizer cannot be read.
            ConfigError: an argument is unknown or invalid, or the Hugging Face library has no equivalent of the
                tokenizer.
        """
        if others or not pretrained:
            problem = f"unknown argument: {', '.join(others)}" if others else "pretrained is missing"
            raise ConfigError(
                f"--model_args of tost_lm: {problem}; give pretrained=RUN, batch_size, device, max_length and tokenizer"
            )
        self.evaluated = EvaluatedCheckpoint.find(path_or_url("pretrained", str(pretrained)))
        limit = read_model_config(self.evaluated.checkpoint).position_limit
        fits = isinstance(max_length, int) and max_length > 0 and (limit is None or max_length <= limit)
        if max_length is not None and not fits:
            allowed = "a positive integer" if limit is None else f"an integer from 1 to the model's positions ({limit})"
            raise ConfigError(f"--model_args max_length={max_length}: not {allowed}; change it, or leave it out")
        super().__init__(
            str(pretrained),
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            device=device,
            max_length=max_length,
            add_bos_token=False,
        )

    def _get_config(self, pretrained: str, **others: Any) -> None:
        self._config = TostConfig.of(read_model_config(self.evaluated.checkpoint))

    def _create_tokenizer(self, pretrained: object, tokenizer: object, **others: Any) -> None:
        self.tokenizer = fast_tokenizer(self.evaluated.tokenizer())
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.evaluated.checkpoint}: the Hugging Face library has no equivalent of its tokenizer, which "
                "lm-evaluation-harness needs; use the tasks of tost eval"
            )

    def _create_model(self, pretrained: str, **others: Any) -> None:
        self._model = TostForCausalLM.from_run(self.evaluated.checkpoint, str(self.device)).float()
        self._model.register_forward_hook(self._require_finite)

    def _require_finite(self, model: object, arguments: object, output: Any) -> None:
        if not output.logits.isfinite().all():
            raise not_finite(self.evaluated.checkpoint)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness's cache of requests."""
        return self.evaluated.hashes()["tokenizer_sha256"]

    def get_model_info(self) -> dict[str, Any]:
        """Identity of the checkpoint, which the harness writes into its results."""
        identity = self.evaluated.identity(None, None) | {"window": self.max_length}
        return {name: value for name, value in identity.items() if value is not None}


register_model("tost_lm")(HarnessModel)
