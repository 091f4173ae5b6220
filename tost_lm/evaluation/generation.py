"""Text generation in the recurrent form: the prompt in one pass, then one token at a time from the model's state."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tost_lm.errors import ConfigError
from tost_lm.model import LMOutput, LMState
from tost_lm.parallel.whole import LanguageModel

Choose = Callable[[Tensor], Tensor]
"""Logits [B, V] in, the next token of each sequence [B] out."""


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt_ids: list[int],
    tokens: int,
    temperature: float,
    seed: int,
    stop_id: int,
    vocab_size: int,
) -> list[int]:
    """Go on from a prompt; the new ids, without the prompt and without `stop_id`, which ends them early.

    Args:
        model: in evaluation mode.
        prompt_ids: at least one id.
        tokens: most ids to generate.
        temperature: 0: the most likely id each time; else logits are divided by it and an id is drawn.
        seed: of the draws.
        stop_id: the end-of-text id.
        vocab_size: ids that the tokenizer has; rows of a padded vocabulary beyond it are never chosen.

    Raises:
        ConfigError: prompt and new tokens together pass the model's positions.
    """
    limit = model.config.position_limit
    if limit is not None and len(prompt_ids) + tokens > limit:
        raise ConfigError(
            f"{len(prompt_ids)} tokens of prompt and {tokens} new ones pass the model's positions ({limit}): "
            "shorten sample.prompt or lower sample.tokens"
        )
    device = next(model.parameters()).device
    choose = greedy if temperature == 0 else sampler(temperature, torch.Generator(device).manual_seed(seed))
    output = model(torch.tensor([prompt_ids], device=device))
    ids: list[int] = []
    for next_B in continuations(model, output, tokens, lambda logits_BV: choose(logits_BV[:, :vocab_size])):
        if next_B.item() == stop_id:
            break
        ids.append(int(next_B.item()))
    return ids


def continuations(model: LanguageModel, output: LMOutput, tokens: int, choose: Choose) -> Iterator[Tensor]:
    """Up to `tokens` times the next id of each sequence [B], from the model's output on what came before."""
    for done in range(1, tokens + 1):
        assert output.logits is not None
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


def state_bytes(state: LMState, tensor_ranks: int = 1) -> int:
    """Memory of what the model keeps of the past: bytes of all tensors of its state.

    `tensor_ranks`: over how many ranks the heads are spread, each of which has such a state of its own heads.
    """
    tensors = [tensor for layer in state.layers for tensor in layer]
    # Of a row alone, not of its heads, is the count of tokens.
    return sum(x.numel() * x.element_size() * (tensor_ranks if x.dim() > 1 else 1) for x in tensors)
