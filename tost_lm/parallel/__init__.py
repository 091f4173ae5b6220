"""Parallelism over ranks: the only package that uses torch.distributed, megatron-core and DeepSpeed."""
