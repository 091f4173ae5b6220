"""Several arrays, such as the shards of a split, read as one. Shape suffix: S segments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Concatenation:
    """Concatenated arrays [n]; only `read` copies."""

    def __init__(self, arrays: "Sequence[np.ndarray]") -> None:
        import numpy as np

        self._arrays = [np.asarray(array) for array in arrays]  # slicing an np.memmap takes 2 µs
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start_S: "np.ndarray", length_S: "np.ndarray", dtype: "type[np.generic]") -> "np.ndarray":
        """The elements [start, start + length) of each segment, concatenated, as `dtype`. No segment may be empty."""
        import numpy as np

        number_S = np.searchsorted(self._ends, start_S, "right")
        left_S = self._ends[number_S] - start_S
        views = []
        for number, left, length in zip(number_S.tolist(), left_S.tolist(), length_S.tolist(), strict=True):
            array = self._arrays[number]
            views.append(array[len(array) - left : len(array) - left + length])
            while length > left:  # continues in the next array
                length, number = length - left, number + 1
                views.append(self._arrays[number][:length])
                left = len(self._arrays[number])
        out = np.empty(length_S.sum(), dtype=dtype)
        return np.concatenate(views, out=out, casting="unsafe") if views else out
