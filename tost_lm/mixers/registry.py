"""All token mixers, and the only list of them: a new one adds its folder, its settings and its spec here.

`tost_lm.mixers.plugins` adds those of users.
"""

from importlib import import_module
from typing import Any

from pydantic import Field

from tost_lm.config import Section
from tost_lm.mixers.delta.settings import DeltaSettings
from tost_lm.mixers.delta.spec import DELTA
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.mixers.softmax.spec import SOFTMAX
from tost_lm.mixers.spec import MixerSpec
from tost_lm.mixers.tssa.settings import TssaSettings
from tost_lm.mixers.tssa.spec import TSSA

SPECS: dict[str, MixerSpec] = {spec.letter: spec for spec in (TSSA, DELTA, SOFTMAX)}
"""By letter, in the order of tables and messages."""


class MixerSettings(Section):
    """A section for each mixer, with the name of its folder."""

    tssa: TssaSettings = Field(default_factory=TssaSettings)
    delta: DeltaSettings = Field(default_factory=DeltaSettings)
    softmax: SoftmaxSettings = Field(default_factory=SoftmaxSettings)


def mixer_class(letter: str) -> Any:
    """The layer of a mixer: a module with `State`, the type of its state, `groups` and `split_heads`."""
    spec = SPECS[letter]
    return spec.plugin.layer if spec.plugin else import_module(f"tost_lm.mixers.{spec.folder}.layer").MIXER
