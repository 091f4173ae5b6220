"""The TSSA layers of a model, and watching them for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def tssa_mixers(model: TostLM) -> list[TssaMixer]:
    """Their mixers, in the order in which they are called."""
    return [module for module in model.modules() if isinstance(module, TssaMixer)]


@contextmanager
def while_hooked(*hooks: "RemovableHandle") -> Iterator[None]:
    """Take the hooks away when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
