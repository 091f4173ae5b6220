"""Settings of how training is spread over ranks."""

from typing import Literal

from tost_lm.config import Section


class ParallelConfig(Section):
    """Every rank reads its own share of the batch; DeepSpeed ZeRO partitions the rest over all ranks."""

    zero_stage: Literal[1, 2] = 1
    """ZeRO stage: 1 partitions the optimizer's state, 2 the gradients too."""
