"""Text generation in the recurrent form: one token at a time from the model's state, in constant memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tost_lm.errors import ConfigError
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.model import LMOutput, LMState

Choose = Callable[[Tensor], Tensor]
"""Logits [B, V] in, the next token of each sequence [B] out."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    output: LMOutput,
    tokens: int,
    temperature: float,
    seed: int,
    stop_id: int,
    vocab_size: int,
) -> Iterator[int]:
    """Go on from what was read; the new ids one by one, without `stop_id`, which ends them early.

    Args:
        model: in evaluation mode.
        output: of the model on one sequence (`tost_lm.model.streaming.read` takes a prompt of any length).
        tokens: most ids to generate.
        temperature: 0: the most likely id each time; else logits are divided by it and an id is drawn.
        seed: of the draws.
        stop_id: the end-of-text id.
        vocab_size: ids that the tokenizer has; rows of a padded vocabulary beyond it are never chosen.

    Raises:
        ConfigError: before the first id: prompt and new tokens together pass the model's positions.
    """
    assert output.state is not None
    limit, prompt_tokens = model.config.position_limit, output.state.positions[0]
    if limit is not None and prompt_tokens + tokens > limit:
        raise ConfigError(
            f"{prompt_tokens} tokens of prompt and {tokens} new ones pass the model's positions ({limit}): "
            "shorten sample.prompt or lower sample.tokens"
        )
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    choose = greedy if temperature == 0 else sampler(temperature, generator)
    for next_B in continuations(model, output, tokens, lambda logits_BV: choose(logits_BV[:, :vocab_size])):
        if next_B.item() == stop_id:
            return
        yield int(next_B.item())


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


def sampler(temperature: float, generator: torch.Generator) -> Choose:
    """Draws from softmax(logits / temperature)."""

    def choose(logits_BV: Tensor) -> Tensor:
        # Shifted first: a tiny temperature must not overflow.
        shifted_BV = logits_BV.float() - logits_BV.float().amax(dim=-1, keepdim=True)
        probabilities_BV = torch.softmax(shifted_BV / temperature, dim=-1)
        return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]

    return choose


def tell(parts: Iterable[str], target: BinaryIO, shown: int) -> dict[str, Any]:
    """Print a text as it comes, in the parts that `decode_ids` gives, and write it to `target`.

    Returns:
        `text`, its first `shown` characters; and how many `characters` and `tokens` it has.
    """
    text, characters, tokens = "", 0, -1  # there is a part for each token, and one more
    for part in parts:
        print(part, end="", flush=True)
        target.write(part.encode())
        text += part[: shown - len(text)]
        characters, tokens = characters + len(part), tokens + 1
    return {"text": text, "characters": characters, "tokens": tokens}


def state_bytes(state: LMState, tensor_ranks: int = 1) -> int:
    """Memory of what the model keeps of the past: bytes of all tensors of its state.

    `tensor_ranks`: over how many ranks the heads are spread, each of which has such a state of its own heads.
    """
    tensors = [tensor for layer in state.layers for tensor in layer]
    # Of a row alone, not of its heads, is the count of tokens.
    return sum(x.numel() * x.element_size() * (tensor_ranks if x.dim() > 1 else 1) for x in tensors)
