"""The held-out text that a model is watched on: what stands in it, and what is known of its tokens.

Shapes: N sequences, T tokens, S tokens of context, V words of the vocabulary, K of the text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.concatenation import Concatenation
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.piecewise import token_text
from tost_lm.errors import DataError

WORD_CLASSES: Mapping[str, str] = {
    "end of text": r"",
    "line break": r"\s*\n\s*",
    "spaces": r"\s+",
    "number": r"\s*\d+",
    "letters after a space": r"\s+[^\W\d_]\w*",
    "letters without a space": r"[^\W\d_]\w*",
    "part of a character": "\\s*\ufffd+",
    "punctuation": r"\s*(?:[^\w\s]|_)+\s*",
    "other": r".*",
}
"""Each with what its tokens match, the first that does."""

BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class HeldoutText:
    """Documents one after another, cut into sequences from all over the held-out text."""

    sequences_NT: Tensor
    documents_NT: Tensor
    """Which document each token is of, by number."""
    context_S: Tensor
    """Other text, from before the sequences."""

    @property
    def document_of(self) -> Tensor:
        """The document of which each sequence has the most tokens, [N]."""
        return self.documents_NT.mode(dim=1).values

    def to(self, device: str) -> "HeldoutText":
        return HeldoutText(*(x.to(device) for x in (self.sequences_NT, self.documents_NT, self.context_S)))


def read_text(shards: Shards, sequences: int, tokens: int, context_tokens: int) -> HeldoutText:
    """Sequences [sequences, tokens], and before them a context of so many tokens.

    Raises:
        DataError: there is less text.
    """
    text = Concatenation(shards.token_arrays("valid"))
    if len(text) < context_tokens + sequences * tokens:
        raise DataError(
            f"{shards.folder}: its held-out text has {len(text):,} tokens, and a context of {context_tokens:,} and "
            f"{sequences} sequences of {tokens:,} are wanted: lower memberships.context_tokens or "
            "memberships.sequences, or give more text (heldout.shards=FOLDER)"
        )
    starts = np.linspace(context_tokens, len(text) - tokens, sequences).astype(np.int64)
    drawn = text.read(np.array([0, *starts]), np.array([context_tokens, *[tokens] * sequences]), np.int64)
    context_S, flat = torch.from_numpy(drawn).split([context_tokens, sequences * tokens])
    ends = np.cumsum(np.concatenate(shards.lengths("valid")), dtype=np.int64)
    documents_NT = np.searchsorted(ends, starts[:, None] + np.arange(tokens), "right")
    return HeldoutText(flat.view(sequences, tokens), torch.from_numpy(documents_NT), context_S)


def information(shards: Shards) -> Tensor:
    """What each word tells by itself, −ln of its share of the held-out text, nats [V]; ∞ for one that is not there."""
    count_V = np.zeros(shards.vocab_size, np.int64)
    for tokens in shards.token_arrays("valid"):
        for start in range(0, len(tokens), BLOCK_TOKENS):  # which are counted as int64
            count_V += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=shards.vocab_size)
    return -torch.from_numpy(count_V / count_V.sum()).log()


def word_classes(tokenizer: Tokenizer, words_K: Tensor) -> Tensor:
    """The number of each word's class among `WORD_CLASSES`, [K]."""
    forms = [re.compile(form, re.DOTALL) for form in WORD_CLASSES.values()]
    texts = [token_text(tokenizer, word) for word in words_K.tolist()]
    found = [next(number for number, form in enumerate(forms) if form.fullmatch(text)) for text in texts]
    return torch.tensor(found, device=words_K.device)
