"""Graphs of torch.compile end where a mixer's operator is called, and nowhere else."""

from torch._dynamo.utils import counters


def other_graph_breaks() -> list[str]:
    """The reasons of all others so far."""
    return [reason for reason in counters["graph_break"] if "torch.compiler.disable" not in reason]
