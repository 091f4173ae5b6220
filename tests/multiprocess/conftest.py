"""The imports of the server of the ranks, and Triton's interpreter, must be set before the first rank is forked."""

import os

import torch

from tost_lm.testing.ranks import PRELOADED

# Most modules of these tests import them: a third of a second for every rank.
PRELOADED += ["pytest", "tost_lm.parallel.apply", "tost_lm.parallel.zero", "tost_lm.pretrain.train"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
