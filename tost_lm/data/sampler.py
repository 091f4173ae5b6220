"""Which windows a training step sees: a pure function of the seed and the step, so that resuming needs no state."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def batch_windows(seed: int, step: int, batch_sequences: int, windows: int) -> "np.ndarray":
    """Window ids, int64 [batch_sequences], each in [0, windows), of training step `step` (0-based).

    Samples are numbered over the whole run, sample i = step · batch_sequences + j; epoch i // windows visits every
    window once in an order of its own, and a batch may span epochs. `seed` and `step` are not negative.
    """
    import numpy as np

    sample_B = np.arange(step * batch_sequences, (step + 1) * batch_sequences)
    epoch_B, position_B = np.divmod(sample_B, windows)
    window_B = np.empty(batch_sequences, dtype=np.int64)
    for epoch in range(int(epoch_B[0]), int(epoch_B[-1]) + 1):
        chosen_B = epoch_B == epoch
        window_B[chosen_B] = _epoch_order(seed, epoch, windows)[position_B[chosen_B]]
    return window_B


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int) -> "np.ndarray":
    import numpy as np

    # Sorted raw bits: NumPy keeps a bit generator's stream the same over versions, not Generator.permutation's.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(windows)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order
