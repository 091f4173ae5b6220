"""Muon for the matrices of the blocks, and AdamW for all other parameters."""

from typing import Any

from tost_lm.optim import adamw
from tost_lm.optim.interface import OptimizerSpec
from tost_lm.optim.settings import OptimConfig

NEWTON_SCHULZ_STEPS = 5  # torch's default


class Muon(OptimizerSpec):
    description = "Muon for the matrices of blocks, AdamW for the rest"
    matrix_bytes = 4  # one momentum
    other_bytes, bandwidth = adamw.OPTIMIZER.other_bytes, adamw.OPTIMIZER.bandwidth

    def build(self, model: Any, config: OptimConfig) -> Any:
        from tost_lm.optim.muon_with_adamw import MuonWithAdamW

        return MuonWithAdamW(model, config)

    def obstacle(self, tensor: int, zero_stage: int) -> str | None:
        for setting, found, needed in (("tensor", tensor, 1), ("zero_stage", zero_stage, 0)):
            if found != needed:
                return (
                    f'optim.kind "muon" needs whole matrices and gradients on each rank, and parallel.{setting} '
                    f'{found} divides them: set parallel.{setting} = {needed} or optim.kind = "adamw"'
                )
        return None

    def matrix_flops(self, rows: int, columns: int) -> float:
        """An iteration multiplies r × c by c × r, r × r by r × r and r × r by r × c."""
        r, c = sorted((rows, columns))
        return NEWTON_SCHULZ_STEPS * (4.0 * r * r * c + 2 * r**3)


OPTIMIZER = Muon()
