"""Training windows: fixed-length stretches of the concatenated documents of a shard folder.

Shape suffixes: N windows in a batch, T tokens of a sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


class TrainingWindows:
    """The train split cut into windows of `sequence_tokens` + 1 tokens, one every `sequence_tokens`.

    Documents follow each other as published, an end-of-text id after each; a window may span documents, never
    shards, and what is left at a shard's end is not used. Window ids are [0, len).
    """

    def __init__(self, shards: Shards, sequence_tokens: int) -> None:
        """Raises ConfigError if no shard is as long as one window."""
        self.sequence_tokens = sequence_tokens
        self._shards = shards.token_arrays("train")
        self._first_ids = [0]  # of each shard, and one past the last window
        for tokens in self._shards:
            self._first_ids.append(self._first_ids[-1] + max(len(tokens) - 1, 0) // sequence_tokens)
        if not len(self):
            longest = max(len(tokens) for tokens in self._shards)
            raise ConfigError(
                f"train.sequence_tokens {sequence_tokens}: longer than the longest of the training shards in "
                f"{shards.folder}, {longest} tokens; shorten it to less than that or add documents"
            )

    def __len__(self) -> int:
        """Number of windows."""
        return self._first_ids[-1]

    def __getitem__(self, window: int) -> "np.ndarray":
        """One window, int64 [sequence_tokens + 1]. Raises IndexError outside [0, len)."""
        import numpy as np

        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        shard = bisect_right(self._first_ids, window) - 1
        start = (window - self._first_ids[shard]) * self.sequence_tokens
        return self._shards[shard][start : start + self.sequence_tokens + 1].astype(np.int64)

    def batch(self, windows: "Sequence[int] | np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """Tokens and the tokens that follow them, both int64 [N, T]."""
        import numpy as np

        window_NT1 = np.stack([self[int(window)] for window in windows])
        return window_NT1[:, :-1], window_NT1[:, 1:]
