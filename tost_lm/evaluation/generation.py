"""Text generation in the recurrent form: one token at a time from the model's state, in constant memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.piecewise import decode_ids
from tost_lm.errors import ConfigError
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.text import ids_of
from tost_lm.model import LMOutput, LMState
from tost_lm.model.streaming import PIECE_TOKENS, in_pieces, read

Choose = Callable[[Tensor], Tensor]
"""Logits [B, V] in, the next token of each sequence [B] out."""


class Sampling(NamedTuple):
    """How the next token is chosen."""

    temperature: float = 0.0
    """0: the most likely one each time; else logits are divided by it and one is drawn."""
    top_k: int | None = None
    """Of so many of the most likely; None: of all."""
    top_p: float = 1.0
    """Of the fewest most likely that have this probability together (nucleus sampling, arXiv 1904.09751), of those
    that `temperature` and `top_k` leave."""
    seed: int = 0
    """Of the draws."""


GREEDY = Sampling()


class Continuation(Iterator[str]):
    """What a model goes on with: its text, in parts as they become whole characters, up to the first of `stops`.

    `tokens` is how many ids it took so far.
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
        """As `generate`, with `stops`, texts before which it ends; ConfigError is raised for an empty one, too."""
        if not all(stops):
            raise ConfigError("an empty text to stop at: leave it out")
        self.tokens = 0
        ids = generate(model, output, tokens, sampling, tokenizer.eot, tokenizer.vocab_size)
        self._parts = until(decode_ids(tokenizer, self._counted(ids)), stops)

    def __next__(self) -> str:
        return next(self._parts)

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
    """What the model goes on with after a prompt, part by part: `print("".join(generate_text(…)))`.

    Args:
        model: in evaluation mode.
        tokenizer: its own.
        prompt: of any length; it stands behind an end of text, as documents do in training.
        tokens: most ids to generate; it ends earlier where the model ends the document.
        stops: texts before which it ends.

    Raises:
        ConfigError: prompt and new tokens together pass the model's positions, `sampling` is impossible, or a stop is
            empty.
    """
    output = read(model, in_pieces(ids_of(tokenizer, [prompt]), PIECE_TOKENS))
    return Continuation(model, output, tokenizer, tokens, sampling, stops)


def generate(
    model: LanguageModel, output: LMOutput, tokens: int, sampling: Sampling, stop_id: int, vocab_size: int
) -> Iterator[int]:
    """Go on from what was read; the new ids one by one, without `stop_id`, which ends them early.

    Args:
        model: in evaluation mode.
        output: of the model on one sequence (`tost_lm.model.streaming.read` takes a prompt of any length).
        tokens: most ids to generate.
        stop_id: the end-of-text id.
        vocab_size: ids that the tokenizer has; rows of a padded vocabulary beyond it are never chosen.

    Raises:
        ConfigError: prompt and new tokens together pass the model's positions, or `sampling` is impossible.
    """
    if sampling.temperature < 0 or (sampling.top_k is not None and sampling.top_k < 1) or not 0 < sampling.top_p <= 1:
        raise ConfigError(
            f"{sampling}: temperature must be 0 or more, top_k 1 or more or None, top_p above 0, at most 1"
        )
    assert output.state is not None
    limit, prompt_tokens = model.config.position_limit, output.state.positions[0]
    if limit is not None and prompt_tokens + tokens > limit:
        raise ConfigError(
            f"{prompt_tokens} tokens of prompt and {tokens} new ones pass the model's positions ({limit}): "
            "shorten sample.prompt or lower sample.tokens"
        )
    generator = torch.Generator(next(model.parameters()).device).manual_seed(sampling.seed)
    choose = greedy if sampling.temperature == 0 else sampler(sampling, generator)
    found = continuations(model, output, tokens, lambda logits_BV: choose(logits_BV[:, :vocab_size]))
    return takewhile(lambda i: i != stop_id, (int(next_B.item()) for next_B in found))


@torch.no_grad()
def continuations(model: LanguageModel, output: LMOutput, tokens: int, choose: Choose) -> Iterator[Tensor]:
    """Up to `tokens` times the next id of each sequence [B], from the model's output on what came before."""
    for done in range(1, tokens + 1):
        next_B = choose(output.logits[:, -1])
        yield next_B
        if done < tokens:
            output = model(next_B[:, None], state=output.state)


def greedy(logits_BV: Tensor) -> Tensor:
    """The most likely id of each sequence [B]."""
    return logits_BV.argmax(dim=-1)


def sampler(sampling: Sampling, generator: torch.Generator) -> Choose:
    """Draws from softmax(logits / temperature), as far as `top_k` and then `top_p` leave it."""

    def choose(logits_BV: Tensor) -> Tensor:
        # Shifted first: a tiny temperature must not overflow.
        shifted_BV = logits_BV.float() - logits_BV.float().amax(dim=-1, keepdim=True)
        probabilities_BV = torch.softmax(shifted_BV / sampling.temperature, dim=-1)
        if sampling.top_k is None and sampling.top_p == 1:
            return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]
        kept_Bk, ids_Bk = probabilities_BV.topk(min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
        kept_Bk = kept_Bk / kept_Bk.sum(-1, keepdim=True)
        if sampling.top_p < 1:
            before_Bk = kept_Bk.cumsum(-1) - kept_Bk  # of those that are likelier: 0 for the first, which always stays
            kept_Bk = kept_Bk.where(before_Bk < sampling.top_p, 0)
        drawn_B1 = torch.multinomial(kept_Bk, 1, generator=generator)
        return ids_Bk.gather(1, drawn_B1)[:, 0]

    return choose


def until(parts: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """A text up to that of `stops` which is complete first, in parts; what may be a beginning of one is held back."""
    held = ""
    for part in parts:
        held += part
        found = [begin for stop in stops if (begin := held.find(stop)) >= 0]
        if found:
            yield held[: min(found)]
            return
        told = len(held) - max((_begun(held, stop) for stop in stops), default=0)
        yield held[:told]
        held = held[told:]
    yield held


def _begun(text: str, stop: str) -> int:
    """The most characters at the text's end that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def tell(parts: Iterable[str], target: BinaryIO, shown: int) -> dict[str, Any]:
    """Print a text as it comes, in parts, and write it to `target`.

    Returns:
        `text`, its first `shown` characters; and how many `characters` it has.
    """
    text, characters = "", 0
    for part in parts:
        print(part, end="", flush=True)
        target.write(part.encode())
        text += part[: shown - len(text)]
        characters += len(part)
    return {"text": text, "characters": characters}


def state_bytes(state: LMState, tensor_ranks: int = 1) -> int:
    """Memory of what the model keeps of the past: bytes of all tensors of its state.

    `tensor_ranks`: over how many ranks the heads are spread, each of which has such a state of its own heads.
    """
    tensors = [tensor for layer in state.layers for tensor in layer]
    # Of a row alone, not of its heads, is the count of tokens.
    return sum(x.numel() * x.element_size() * (tensor_ranks if x.dim() > 1 else 1) for x in tensors)
