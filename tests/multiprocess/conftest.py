"""Ranks are forked from one server: what it is to have loaded, and how Triton is to run, must be settled before."""

import os

import torch

from tost_lm.testing.ranks import PRELOADED

# What most modules of these tests import: a third of a second for every rank.
PRELOADED += ["pytest", "tost_lm.parallel.apply", "tost_lm.parallel.zero", "tost_lm.training.loop"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
