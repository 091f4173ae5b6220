"""Ranks are forked from a server that has Triton loaded, so its interpreter must be chosen before that starts."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
