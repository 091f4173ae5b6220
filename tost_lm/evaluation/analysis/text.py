"""Held-out text for the analyses, and the information and word class of its tokens.

Shapes: N sequences, T tokens, S tokens of context, V vocabulary, K different tokens of the text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.shards import Concatenation, Shards, token_counts
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import token_text
from tost_lm.errors import DataError

WORD_CLASSES: Mapping[str, str] = {
    "end of text": r"",
    "line break": r"\s*\n\s*",
    "spaces": r"\s+",
    "number": r"\s*\d+",
    "letters after a space": r"\s+[^\W\d_]\w*",
    "letters without a space": r"[^\W\d_]\w*",
    "incomplete character": "\\s*\ufffd+",
    "punctuation": r"\s*(?:[^\w\s]|_)+\s*",
    "other": r".*",
}
"""Patterns by class. A token belongs to the first class whose pattern it matches."""


@dataclass(frozen=True)
class HeldoutText:
    """Sequences spread evenly over the concatenated held-out documents."""

    sequences_NT: Tensor
    documents_NT: Tensor
    """Index of each token's document."""
    context_S: Tensor
    """Text before the sequences."""

    @property
    def document_of(self) -> Tensor:
        """The document with the most tokens in each sequence [N]."""
        return self.documents_NT.mode(dim=1).values

    def to(self, device: str) -> "HeldoutText":
        return HeldoutText(*(x.to(device) for x in (self.sequences_NT, self.documents_NT, self.context_S)))


def read_text(shards: Shards, sequences: int, tokens: int, context_tokens: int) -> HeldoutText:
    """Sequences [sequences, tokens] and a context of `context_tokens` before them.

    Raises:
        DataError: the held-out text is too short.
    """
    text = Concatenation(shards.token_arrays("valid"))
    if len(text) < context_tokens + sequences * tokens:
        raise DataError(
            f"{shards.folder}: its held-out text is too short for a context of {context_tokens:,} tokens and "
            f"{sequences} sequences of {tokens:,}: {len(text):,} tokens; lower memberships.context_tokens or "
            "memberships.sequences, or give more text (heldout.shards=FOLDER)"
        )
    starts = np.linspace(context_tokens, len(text) - tokens, sequences).astype(np.int64)
    drawn = text.read(np.array([0, *starts]), np.array([context_tokens, *[tokens] * sequences]), np.int64)
    context_S, flat = torch.from_numpy(drawn).split([context_tokens, sequences * tokens])
    ends = np.cumsum(np.concatenate(shards.lengths("valid")), dtype=np.int64)
    documents_NT = np.searchsorted(ends, starts[:, None] + np.arange(tokens), "right")
    return HeldoutText(flat.view(sequences, tokens), torch.from_numpy(documents_NT), context_S)


def unigram_information(shards: Shards) -> Tensor:
    """−ln of each token's relative frequency in the held-out text, nats [V]; ∞ for tokens that do not occur."""
    count_V = token_counts(shards, "valid")
    return -torch.from_numpy(count_V / count_V.sum()).log()


def word_classes(tokenizer: Tokenizer, tokens_K: Tensor) -> Tensor:
    """Index in `WORD_CLASSES` of each token's class [K]."""
    patterns = [re.compile(pattern, re.DOTALL) for pattern in WORD_CLASSES.values()]
    texts = [token_text(tokenizer, token) for token in tokens_K.tolist()]
    found = [next(i for i, pattern in enumerate(patterns) if pattern.fullmatch(text)) for text in texts]
    return torch.tensor(found, device=tokens_K.device)
