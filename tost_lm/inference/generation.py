"""The interface of a model in evaluation, ours on one or several ranks or one of another library; and text generation
from the model's state: one token at a time, in constant memory for TSSA layers.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import decode_ids
from tost_lm.errors import CheckpointError, ConfigError, TostError
from tost_lm.inference.decoding import decoder
from tost_lm.model import LMOutput, LMState, ModelConfig
from tost_lm.model.streaming import TILE_TOKENS, StreamingModel, in_tiles, prefill


class ForeignFacts(NamedTuple):
    """Facts about a model of another library, by their names in `ModelConfig`."""

    context_length: int
    """Tokens that it was trained to read at once, the default window."""
    position_limit: int | None
    """Maximum number of tokens; None: unlimited."""
    pattern: str
    """The library's name of the architecture."""
    kept_tokens: None = None
    """Tokens whose keys and values are in its state: all."""


ModelFacts = ModelConfig | ForeignFacts
"""Facts about a model beside its weights."""


class LanguageModel(StreamingModel, Protocol):
    """A model in evaluation mode. All ranks of one copy of the model call it with the same arguments."""

    name: str
    """Names it in errors."""

    @property
    def config(self) -> ModelFacts: ...


Choose = Callable[[Tensor], Tensor]
"""Maps logits [B, V] to the next token of each sequence [B]."""


class Sampling(NamedTuple):
    """Settings of the choice of the next token."""

    temperature: float = 0.0
    """0: greedy; otherwise tokens are drawn from softmax(logits / temperature)."""
    top_k: int | None = None
    """Draw from this many most likely tokens; None: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens with this total probability (nucleus sampling, arXiv 1904.09751), after
    `temperature` and `top_k`."""
    seed: int = 0


GREEDY = Sampling()
NOT_FINITE = -1
"""The id that stands for logits of which one is not finite: one read per token tells both."""


def not_finite(name: object) -> CheckpointError:
    """The error of whatever reads numbers of a model."""
    return CheckpointError(f"{name}: its logits are not finite (NaN or infinite); use an earlier checkpoint")


def require_finite(model: LanguageModel, nats: np.ndarray) -> None:
    """Raises CheckpointError if one of the scores is not finite."""
    if not np.isfinite(nats).all():
        raise not_finite(model.name)


class Continuation(Iterator[str]):
    """Generated text, as strings of complete characters, up to the first of `stops`.

    `tokens` counts the ids generated so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        output: LMOutput,
        tokenizer: Tokenizer,
        tokens: int,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
    ) -> None:
        """Like `generate`, with stop strings. Raises ConfigError also for an empty stop string."""
        if not all(stops):
            raise ConfigError("a stop string is empty; leave it out")
        self.tokens = 0
        ids = generate(model, output, tokens, sampling, tokenizer.stop, tokenizer.vocab_size)
        self._texts = until(decode_ids(tokenizer, self._counted(ids)), stops)

    def __next__(self) -> str:
        return next(self._texts)

    def _counted(self, ids: Iterator[int]) -> Iterator[int]:
        for i in ids:
            self.tokens += 1
            yield i


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling = GREEDY,
    stops: Sequence[str] = (),
) -> Continuation:
    """Continue a prompt: `print("".join(generate_text(…)))`.

    Args:
        model: in evaluation mode.
        tokenizer: the model's tokenizer.
        prompt: text of any length, perhaps empty; the model reads it after an end-of-text token, as in training.
        tokens: maximum number of ids; generation stops earlier at an end-of-text token.
        stops: stop strings; the text ends before the first of them.

    Raises:
        ConfigError: prompt and new tokens exceed the model's positions, `sampling` is invalid, or a stop string is
            empty.
        CheckpointError: while iterating, a logit is not finite.
    """
    output = prefill(model, in_tiles([tokenizer.eot, tokenizer.encode_array(prompt)], TILE_TOKENS))
    return Continuation(model, output, tokenizer, tokens, sampling, stops)


def generate(
    model: LanguageModel,
    output: LMOutput,
    tokens: int,
    sampling: Sampling,
    stop_id: int | None,
    vocab_size: int,
) -> Iterator[int]:
    """Generate ids one by one, up to `stop_id` (exclusive).

    Args:
        model: in evaluation mode.
        output: the model's output on one sequence (`tost_lm.model.streaming.prefill` reads prompts of any length).
        tokens: maximum number of ids.
        stop_id: the end-of-text id; None: the vocabulary has none.
        vocab_size: as in `chosen_ids`.

    Raises:
        ConfigError: prompt and new tokens exceed the model's positions, or `sampling` is invalid.
        CheckpointError: while iterating, a logit is not finite.
    """
    if sampling.temperature < 0 or (sampling.top_k is not None and sampling.top_k < 1) or not 0 < sampling.top_p <= 1:
        raise ConfigError(f"{sampling}: invalid; set temperature >= 0, top_k to None or >= 1, and 0 < top_p <= 1")
    assert output.state is not None
    limit, prompt_tokens = model.config.position_limit, output.state.positions[0]
    if limit is not None and prompt_tokens + tokens > limit:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {tokens} new tokens exceed the model's {limit} positions; "
            "shorten sample.prompt or lower sample.tokens"
        )
    generator = torch.Generator(next(model.parameters()).device).manual_seed(sampling.seed)
    choose = greedy if sampling.temperature == 0 else sampler(sampling, generator)
    ids = (i for (i,) in chosen_ids(model, output, tokens, choose, vocab_size))
    return takewhile(lambda i: i != stop_id, ids)


def chosen_ids(
    model: LanguageModel, output: LMOutput, tokens: int, choose: Choose, vocab_size: int
) -> Iterator[list[int]]:
    """The ids of `continuations` on the host, those of all sequences at once.

    Args:
        vocab_size: ids of the tokenizer; rows of a padded vocabulary beyond it are never chosen.

    Raises:
        CheckpointError: while iterating, a logit is not finite.
    """

    def choose_finite(logits_BV: Tensor) -> Tensor:
        logits_BV = logits_BV[:, :vocab_size]
        finite_B1 = logits_BV.isfinite().all(1, keepdim=True)
        return choose(logits_BV.where(finite_B1, 0)).where(finite_B1[:, 0], NOT_FINITE)

    for next_B in continuations(model, output, tokens, choose_finite):
        ids = next_B.tolist()
        if NOT_FINITE in ids:
            raise not_finite(model.name)
        yield ids


@torch.no_grad()
def continuations(model: LanguageModel, output: LMOutput, tokens: int, choose: Choose) -> Iterator[Tensor]:
    """Yield the next id of each sequence [B], `tokens` times, from the model's output on the tokens before."""
    if tokens == 0:
        return
    next_B = choose(output.logits[:, -1])
    yield next_B
    if tokens == 1:
        return
    assert output.state is not None
    decode = decoder(model, output.state)
    del output  # the memory of its state
    for _ in range(tokens - 1):
        next_B = choose(decode(next_B))
        yield next_B


def greedy(logits_BV: Tensor) -> Tensor:
    """The most likely id of each sequence [B]."""
    return logits_BV.argmax(dim=-1)


def sampler(sampling: Sampling, generator: torch.Generator) -> Choose:
    """Draw from softmax(logits / temperature), limited by `top_k` and then `top_p`."""

    def choose(logits_BV: Tensor) -> Tensor:
        # Shift first, so that a tiny temperature does not overflow.
        shifted_BV = logits_BV.float() - logits_BV.float().amax(dim=-1, keepdim=True)
        probabilities_BV = torch.softmax(shifted_BV / sampling.temperature, dim=-1)
        if sampling.top_k is None and sampling.top_p == 1:
            return _draw(probabilities_BV, generator)
        kept_Bk, ids_Bk = probabilities_BV.topk(min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
        kept_Bk = kept_Bk / kept_Bk.sum(-1, keepdim=True)
        if sampling.top_p < 1:
            before_Bk = kept_Bk.cumsum(-1) - kept_Bk  # 0 for the most likely id, which always stays
            kept_Bk = kept_Bk.where(before_Bk < sampling.top_p, 0)
        return ids_Bk.gather(1, _draw(kept_Bk, generator)[:, None])[:, 0]

    return choose


def _draw(weights_Bk: Tensor, generator: torch.Generator) -> Tensor:
    """An index per row, [B], with a probability in proportion to its weight: that of torch.multinomial, which on a GPU
    waits to check the weights."""
    return (weights_Bk / torch.empty_like(weights_Bk).exponential_(generator=generator)).argmax(-1)


def until(texts: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The concatenated texts up to the first complete stop string; a possible beginning of one is held back."""
    held = ""
    for text in texts:
        held += text
        found = [begin for stop in stops if (begin := held.find(stop)) >= 0]
        if found:
            yield held[: min(found)]
            return
        end = len(held) - max((_overlap(held, stop) for stop in stops), default=0)
        yield held[:end]
        held = held[end:]
    yield held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_text(text: str) -> None:
    """Print a text without a line break after it. A terminal, which would obey control characters, gets all but line
    breaks and tabs as escapes."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    print(text, end="", flush=True)


def print_stream(texts: Iterable[str], target: BinaryIO, kept: int) -> dict[str, Any]:
    """Print texts as they arrive, without line breaks, and write them to `target`. An error ends the line first.

    Returns:
        `text`, the first `kept` characters, and `characters`, the length of all.
    """
    start, characters = "", 0
    try:
        for text in texts:
            print_text(text)
            target.write(text.encode())
            start += text[: kept - len(start)]
            characters += len(text)
    except (TostError, OSError):
        print(flush=True)
        raise
    return {"text": start, "characters": characters}


def _tensors(layer: Any) -> Iterator[Tensor]:
    """The tensors of a layer's state, or of a cache of another library."""
    if isinstance(layer, Tensor):
        yield layer
    elif "Cache" in type(layer).__name__ or type(layer).__name__.endswith("Layer"):
        yield from _tensors(vars(layer))
    elif isinstance(layer, tuple | list | dict):
        for part in layer.values() if isinstance(layer, dict) else layer:
            yield from _tensors(part)


def state_bytes(state: LMState, tensor_ranks: int = 1) -> int:
    """Bytes of all tensors of a state.

    Args:
        tensor_ranks: number of ranks that hold such a state, each of its own heads.
    """
    tensors = [x for layer in state.layers for x in _tensors(layer)]
    # The token count [B] has no heads.
    return sum(x.numel() * x.element_size() * (tensor_ranks if x.dim() > 1 else 1) for x in tensors)
