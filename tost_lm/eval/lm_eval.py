"""A checkpoint as a model of lm-evaluation-harness. Importing this module registers it there as `tost_lm`.

    import tost_lm.eval.lm_eval
    from lm_eval import simple_evaluate
    simple_evaluate(model="tost_lm", model_args="pretrained=runs/demo", tasks=["lambada_openai"])

Tokenization follows the harness (`TemplateLM`): white space at the end of a context moves to the continuation, and the
continuation's tokens are those of both texts together after the context's. The end-of-text token stands only before a
text without context. The harness's class for Hugging Face models does the same for an export with add_bos_token=False.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from tost_lm.config import path_or_url
from tost_lm.errors import CheckpointError, ConfigError, DataError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.generation import Continuation, LanguageModel, Sampling
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods, Request, disjoint_windows, left_truncated
from tost_lm.model.streaming import TILE_TOKENS, in_tiles, prefill

GENERATED_TOKENS = 256  # default of the harness's other models
HARNESS_DEVICE = "cuda:0"  # default of its --device, with or without a GPU
NEUTRAL = {"num_beams": 1}
SHOWN = 40


class HarnessModel(TemplateLM):
    """A model that scores and generates texts for the harness.

    The harness sees one model on one rank. All ranks get the same requests, each copy of the model computes a subset of
    them, and all ranks return all answers.
    """

    ranks: ClassVar[Ranks] = Ranks()
    """The ranks of the launch; set before a model is created."""

    def __init__(
        self,
        pretrained: str = "",
        batch_size: int | str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        tokenizer: str = "",
        **others: object,
    ) -> None:
        """The arguments are those of the harness's --model_args, --batch_size and --device.

        Args:
            pretrained: a run folder, a step folder or an export.
            batch_size: number of texts of the model's window that are read at once; `auto`: 8,192 tokens, on a CPU
                2,048. It changes memory and time, not the result.
            device: None, or the harness's default `cuda:0`: the GPU if there is one.
            max_length: tokens of a window; a longer context loses its beginning. None: model.context_length.
            tokenizer: is not read here; tasks such as RULER size their texts by this tokenizer of the Hugging Face
                library.

        Raises:
            CheckpointError, DataError: the checkpoint or its tokenizer cannot be read.
            ConfigError: an argument is unknown or invalid.
        """
        super().__init__()
        if others or not pretrained:
            problem = f"unknown argument: {', '.join(others)}" if others else "pretrained is missing"
            raise ConfigError(
                f"--model_args of tost_lm: {problem}; give pretrained=RUN, batch_size, device, max_length and tokenizer"
            )
        self.evaluated = EvaluatedCheckpoint.find(path_or_url("pretrained", str(pretrained)))
        self.text_tokenizer = self.evaluated.lossless_tokenizer()
        self.model = self._load(device)
        self.window, limit = max_length or self.model.config.context_length, self.model.config.position_limit
        if not isinstance(self.window, int) or self.window < 1 or (limit is not None and self.window > limit):
            allowed = "a positive integer" if limit is None else f"an integer from 1 to the model's positions ({limit})"
            raise ConfigError(f"--model_args max_length={max_length}: not {allowed}; change it, or leave it out")
        self.read_limit = max_length or limit
        """Tokens of a context and its continuation; None: any."""
        self.batch_tokens = _windows(batch_size) * self.window or None
        self._device = next(self.model.parameters()).device

    def _load(self, device: str | None) -> LanguageModel:
        if device in (None, HARNESS_DEVICE):
            return self.ranks.load(self.evaluated)
        if self.ranks.mesh:
            raise ConfigError(f"--device {device}: each rank has its own device; leave it out")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"--device {device}: {str(error).splitlines()[0]}; give cpu or cuda") from None
        return self.evaluated.load(device)

    @property
    def eot_token_id(self) -> int:
        """The token before a text without context."""
        return self.text_tokenizer.eot

    @property
    def max_length(self) -> int:
        """Tokens of a window; a longer context is truncated on the left."""
        return self.window

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Ids without special tokens."""
        return self.text_tokenizer.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """Identity of the checkpoint, which the harness writes into its results."""
        identity = self.evaluated.identity(None, None) | {"window": self.window}
        return {name: value for name, value in identity.items() if value is not None}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise ConfigError("tost_lm has no chat template; leave --apply_chat_template out")

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        if self.ranks.mesh:
            raise ConfigError("--use_cache works on one rank only; leave it out, or start without a launcher")
        super().set_cache_hook(cache_hook)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy generation would give it.

        Raises:
            DataError: a continuation has no token.
            ConfigError: a continuation alone exceeds the model's positions.
            CheckpointError: a score is not finite.
        """
        scores = self._score([self._request(*request) for request in requests])
        return [(-float(nats), bool(greedy)) for nats, _, greedy in zip(*scores, strict=True)]

    def _score(self, requests: Sequence[Request]) -> Likelihoods:
        scores = score_requests(self.model, requests, self.batch_tokens, self.ranks)
        if not np.isfinite(scores.nats).all():
            raise CheckpointError(
                f"{self.evaluated.checkpoint}: its scores are not finite (NaN or infinite); use an earlier checkpoint"
            )
        return scores

    def _request(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> Request:
        if not continuation:
            raise DataError(
                f"continuation without a token after {texts[0][-SHOWN:]!r}: {texts[1][:SHOWN]!r}; remove the example"
            )
        context = context or [self.eot_token_id]  # its white space moved to the continuation
        return left_truncated(np.array([*context, *continuation], dtype=np.int64), len(context), self.window)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text in disjoint windows, as in `wikitext2@lm-eval`. Raises CheckpointError."""
        texts = [self.text_tokenizer.encode_array(request.args[0]) for request in requests]
        windows = [list(disjoint_windows(ids, self.eot_token_id, self.window, fill_last=True)) for ids in texts]
        scores = self._score([window for of_text in windows for window in of_text])
        bounds = np.cumsum([0, *map(len, windows)])
        return [-float(scores.nats[begin:end].sum()) for begin, end in pairwise(bounds)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string, the end of text or the task's limit.

        A model without a position limit reads whole contexts, unless max_length is given; others read the end that
        leaves room for the new tokens.
        Draws follow torch's seed and do not depend on the number of ranks.

        Raises:
            ConfigError: a task needs an unsupported setting, or more tokens than the model has positions.
            CheckpointError: a logit is not finite.
        """
        settings = [_GenerationSettings.parse(one.arguments[1], self.read_limit) for one in requests]
        seeds = torch.randint(2**62, (len(requests),)).tolist()
        mine = range(self.ranks.copy, len(requests), self.ranks.copies)
        progress = tqdm(mine, desc="Generating", disable=disable_tqdm or self.ranks.rank > 0)
        generated = [(n, self._generate(requests[n].arguments[0], settings[n], seeds[n])) for n in progress]
        texts = dict(pair for of_rank in self.ranks.gather(generated) for pair in of_rank)
        return [texts[number] for number in range(len(requests))]

    def _generate(self, context: str, settings: "_GenerationSettings", seed: int) -> str:
        ids, limit = self.tok_encode(context) or [self.eot_token_id], self.read_limit
        tokens, sampling = settings.tokens, settings.sampling._replace(seed=seed)
        if limit is not None:
            ids = ids[-(limit - tokens) :]
        output, name = prefill(self.model, in_tiles(ids, TILE_TOKENS)), str(self.evaluated.checkpoint)
        return "".join(Continuation(self.model, output, self.text_tokenizer, tokens, sampling, settings.stops, name))


register_model("tost_lm")(HarnessModel)


class _GenerationSettings(NamedTuple):
    stops: list[str]
    tokens: int
    sampling: Sampling

    @classmethod
    def parse(cls, gen_kwargs: Mapping[str, Any], limit: int | None) -> "_GenerationSettings":
        """Read a request's arguments for a model with `limit` positions. Raises ConfigError."""
        given: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), GENERATED_TOKENS)}
        stops, tokens, temperature = given["until"], given["max_gen_toks"], float(given.get("temperature", 0))
        supported = ["until", "max_gen_toks", "temperature", "do_sample", "top_k", "top_p"]
        for name, value in given.items():
            if name not in supported and value is not None and value != NEUTRAL.get(name):
                raise ConfigError(
                    f"generation setting of a task that tost_lm does not support: {name}={value}; "
                    f"give --gen_kwargs {name}={NEUTRAL.get(name)}"
                )
        if limit is not None and tokens >= limit:
            raise ConfigError(
                f"new tokens of a task exceed the model's {limit} positions: {tokens}; "
                f"give --gen_kwargs max_gen_toks=N below {limit}"
            )
        top_k, top_p = given.get("top_k"), given.get("top_p")
        top_k = None if top_k in (None, 0, -1) else int(top_k)  # the harness's values for all tokens
        sampling = Sampling(temperature, top_k, 1.0 if top_p is None else float(top_p))
        return cls([stop for stop in stops if stop], tokens, sampling)


def _windows(batch_size: int | str) -> int:
    """Texts per batch; 0: auto. Raises ConfigError."""
    text = str(batch_size)
    if text.partition(":")[0] == "auto":
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--batch_size {text}: not a positive integer; give one, or auto")
    return int(text)
