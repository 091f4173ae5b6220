"""Delta layers whose keys begin as those of the token before, and queries and values as their own: a plugin.

    tost train demo 'model.plugins=["experiments/comparison/shifted_keys.py"]' model.pattern=KKKA run.name=shifted

The package's convolutions begin with random values, as released.
"""

import torch

from tost_lm.mixers.delta.layer import DeltaMixer
from tost_lm.mixers.delta.settings import DeltaSettings
from tost_lm.mixers.delta.spec import DeltaSpec
from tost_lm.mixers.plugins import register
from tost_lm.ops.initialization import InitialValue


class ShiftedKeysSpec(DeltaSpec):
    letter, name, tag, settings = "K", "gated delta rule, shifted keys", "shifted-keys", DeltaSettings


class ShiftedKeys(DeltaMixer):
    def initial_values(self) -> dict[str, InitialValue]:
        taps_hEK = torch.zeros_like(self.conv, device="cpu").unflatten(0, (self.key_heads, -1))
        keys = slice(self.key_size, 2 * self.key_size)
        taps_hEK[..., -1] = 1  # the token itself
        taps_hEK[:, keys] = taps_hEK[:, keys].roll(-1, -1)
        return super().initial_values() | {"conv": taps_hEK.flatten(0, 1)}


register(ShiftedKeysSpec(), ShiftedKeys)
