"""A checkpoint as a model of lm-evaluation-harness, registered there as `tost_lm` when this module is imported.

    import tost_lm.interop.lm_eval
    from lm_eval import simple_evaluate
    simple_evaluate(model="tost_lm", model_args="pretrained=runs/demo", tasks=["lambada_openai"])

How texts become tokens is the harness's own (`TemplateLM`): white space at the end of a context goes over to the
continuation, whose tokens are those that both together have beyond the context's.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.generation import Continuation, Sampling
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.likelihood import Request, score_requests
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import Subject
from tost_lm.evaluation.windows import after_what_fits, disjoint_windows
from tost_lm.model.streaming import PIECE_TOKENS, in_pieces, read

GENERATED_TOKENS = 256  # where a task does not say how many, as in the harness's other models
HARNESS_DEVICE = "cuda:0"  # what its command line gives to models when --device is left out, with or without a GPU
NEUTRAL = {"num_beams": 1}
SHOWN = 40


class HarnessModel(TemplateLM):
    """A model that scores and writes texts for the harness.

    To the harness it is one model on one rank, whatever `ranks` are: all of them get the same requests, share them out
    to their copies of the model, and have all answers.
    """

    ranks: ClassVar[Ranks] = Ranks()
    """Of the launch; set before a model is made."""

    def __init__(
        self, pretrained: str = "", batch_size: int | str = "auto", device: str | None = None, **others: object
    ) -> None:
        """The arguments are those of the harness's --model_args, --batch_size and --device.

        Args:
            pretrained: a run folder, a step folder or an export.
            batch_size: texts as long as the model's window that are read at once; `auto`: 8,192 tokens, on a CPU
                2,048. It changes memory and time, not the result.
            device: None, or the harness's default `cuda:0`: the GPU where there is one.

        Raises:
            CheckpointError, DataError: the checkpoint or its tokenizer cannot be read.
            ConfigError: an argument cannot be used.
        """
        super().__init__()
        if others or not pretrained:
            problem = f"{', '.join(others)}: no such argument" if others else "pretrained is missing"
            raise ConfigError(f"--model_args of tost_lm: {problem}; it takes pretrained=RUN, batch_size and device")
        self.subject = Subject.find(Path(str(pretrained)))
        self.text_tokenizer = self.subject.tokenizer()
        self.model = self._load(device)
        self.window = self.model.config.max_positions
        self.batch_tokens = _windows(batch_size) * self.window or None
        self._device = next(self.model.parameters()).device

    def _load(self, device: str | None) -> LanguageModel:
        if device in (None, HARNESS_DEVICE):
            return self.ranks.load(self.subject)
        if self.ranks.mesh:
            raise ConfigError(f"--device {device}: each rank has a device of its own; leave it out")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"--device {device}: cannot be used: {str(error).splitlines()[0]}") from None
        return self.subject.load(device)

    @property
    def eot_token_id(self) -> int:
        """It stands before a text that has nothing before it."""
        return self.text_tokenizer.eot

    @property
    def max_length(self) -> int:
        """Tokens that are read at once; of longer texts the last, when they are scored."""
        return self.window

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """No special token is ever added."""
        return self.text_tokenizer.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: which checkpoint they are of."""
        identity = self.subject.identity(None, None) | {"window": self.window}
        return {name: value for name, value in identity.items() if value is not None}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise ConfigError("tost_lm has no chat template: leave --apply_chat_template out")

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        if self.ranks.mesh:
            raise ConfigError("--use_cache is of one rank: leave it out, or start without a launcher")
        super().set_cache_hook(cache_hook)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what the model would write.

        Raises:
            DataError: a continuation has no token.
            ConfigError: a continuation alone passes the model's positions.
        """
        asked = [self._request(*request) for request in requests]
        scores = score_requests(self.model, asked, self.batch_tokens, self.ranks)
        return [(-float(nats), bool(greedy)) for nats, _, greedy in zip(*scores, strict=True)]

    def _request(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> Request:
        if not continuation:
            raise DataError(
                f"the continuation {texts[1][:SHOWN]!r} has no token of its own after {texts[0][-SHOWN:]!r}; "
                "leave the example out"
            )
        context = context or [self.eot_token_id]  # where it was white space alone, which the continuation has now
        return after_what_fits(np.array([*context, *continuation], dtype=np.int64), len(context), self.window)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows as `wikitext2@lm-eval` has them."""
        texts = [self.text_tokenizer.encode_array(request.args[0]) for request in requests]
        windows = [list(disjoint_windows(ids, self.eot_token_id, self.window, fill_last=True)) for ids in texts]
        scores = score_requests(self.model, [each for some in windows for each in some], self.batch_tokens, self.ranks)
        bounds = np.cumsum([0, *map(len, windows)])
        return [-float(scores.nats[begin:end].sum()) for begin, end in pairwise(bounds)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model goes on with after each context, up to a stop string, the end of text or the task's limit.

        A context is read whole, piece by piece, if the model reads any number of tokens; else its end, as far as there
        is room before what is generated. Draws follow torch's seed, however many ranks there are.

        Raises:
            ConfigError: a task asks for a way of drawing that there is not, or for more tokens than the model has
                positions.
        """
        ways = [_Way.of(request.arguments[1], self.model.config.position_limit) for request in requests]
        seeds = torch.randint(2**62, (len(requests),)).tolist()
        mine = range(self.ranks.copy, len(requests), self.ranks.copies)
        told = tqdm(mine, desc="Generating", disable=disable_tqdm or self.ranks.rank > 0)
        written = [(number, self._write(requests[number].arguments[0], ways[number], seeds[number])) for number in told]
        texts = dict(pair for part in self.ranks.gather(written) for pair in part)
        return [texts[number] for number in range(len(requests))]

    def _write(self, context: str, way: "_Way", seed: int) -> str:
        ids, limit = self.tok_encode(context) or [self.eot_token_id], self.model.config.position_limit
        if limit is not None:
            ids = ids[-(limit - way.tokens) :]
        output = read(self.model, in_pieces(ids, PIECE_TOKENS))
        tokenizer = self.text_tokenizer
        sampling = way.sampling._replace(seed=seed)
        return "".join(Continuation(self.model, output, tokenizer, way.tokens, sampling, way.stops))


register_model("tost_lm")(HarnessModel)


class _Way(NamedTuple):
    """How a task wants a text to be written."""

    stops: list[str]
    tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, gen_kwargs: Mapping[str, Any], limit: int | None) -> "_Way":
        """Of a request's arguments, for a model with so many positions. Raises ConfigError."""
        wanted: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), GENERATED_TOKENS)}
        stops, tokens, temperature = wanted["until"], wanted["max_gen_toks"], float(wanted.get("temperature", 0))
        understood = ["until", "max_gen_toks", "temperature", "do_sample", "top_k", "top_p"]
        for name, value in wanted.items():
            if name not in understood and value is not None and value != NEUTRAL.get(name):
                raise ConfigError(
                    f"a task asks for {name}={value}, and tost_lm draws by temperature, top_k and top_p; "
                    f"give --gen_kwargs {name}={NEUTRAL.get(name)}"
                )
        if limit is not None and tokens >= limit:
            raise ConfigError(
                f"a task asks for {tokens} new tokens, and the model has {limit} positions for the context and those; "
                "give --gen_kwargs max_gen_toks=N below that"
            )
        top_k, top_p = wanted.get("top_k"), wanted.get("top_p")
        top_k = None if top_k in (None, 0, -1) else int(top_k)  # so other models of the harness say all
        sampling = Sampling(temperature, top_k, 1.0 if top_p is None else float(top_p))
        return cls([stop for stop in stops if stop], tokens, sampling)


def _windows(batch_size: int | str) -> int:
    """0: auto. Raises ConfigError."""
    text = str(batch_size)
    if text.partition(":")[0] == "auto":
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--batch_size {text}: must be a whole number from 1 on, or auto")
    return int(text)
