"""What must be known before torch is first imported: each of the workers that share the cores has one thread; and where
there is no GPU, Triton's kernels run in its interpreter."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
