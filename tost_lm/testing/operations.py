"""Operations of torch's dispatcher that launch something, counted by name."""

from collections import Counter
from typing import Any

from tost_lm.torch_internals import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations that launch something, by name: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in func.name() or func.name() == "aten::_unsafe_view"):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))
