"""What a run will take, before a GPU is rented: memory, traffic, time and disk.

    python -m pretrain.plan configs/pretrain/owt_tost_base.toml cluster.nodes=2 train.micro_batch_sequences=5

Give it what pretrain.train is given, with the machines in cluster.… beside it. Prints a table and writes nothing. What
does not fit ends with a line that says what does, and exit code 2. Times take nothing to overlap, and hardware to reach
the shares of its published figures that cluster.achieved_flops and cluster.achieved_bandwidth say: those two are
assumptions, so compare them with a first run's metrics.jsonl (mfu).
"""

from collections.abc import Iterator
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.model.flops import parameters
from tost_lm.training import plan
from tost_lm.training.plan_config import PlanConfig
from tost_lm.training.plan_memory import fullest

Row = tuple[str, str, str]
"""What, how much, and from what."""


def main(path: Path, config: PlanConfig) -> None:
    plan.require_even_shares(config)
    config = plan.with_tile_size(config)
    rows = [*model_rows(config), *memory_rows(config), *traffic_rows(config), *time_rows(config), *disk_rows(config)]
    print(markdown([("", "", "from"), *rows]))
    if problem := plan.what_does_not_fit(config):
        raise ConfigError(problem)


def model_rows(config: PlanConfig) -> Iterator[Row]:
    parts, flops = parameters(config.model), plan.work(config)
    steps, tokens = config.train.steps, config.batch_tokens * config.train.steps
    yield "parameters", f"{parts.total / 1e6:.2f} M", _listed(parts._asdict(), 1e6)
    by_kind = {name: part.total for name, part in flops._asdict().items()}
    yield "FLOP a token", f"{flops.total / 1e9:.4g} G", f"{_listed(by_kind, 1e9, '.4g')}; backward included"
    yield (
        "FLOP in all",
        f"{flops.total * tokens:.3g}",
        f"{tokens / 1e9:.4g} G tokens: {steps:,} × {config.batch_tokens:,}",
    )
    cluster, parallel, sequences = config.cluster, config.parallel, config.train.micro_batch_sequences
    yield (
        "ranks",
        f"{cluster.ranks}",
        f"{_count(cluster.nodes, 'node')} of {cluster.gpus_per_node}; tensor {parallel.tensor} × sequence "
        f"{parallel.sequence} × data {parallel.data_ranks(cluster.ranks)}; "
        f"{_count(config.micro_batches, 'micro-batch', 'es')} of {_count(sequences, 'sequence')}{_in_tiles(config)}",
    )


def memory_rows(config: PlanConfig) -> Iterator[Row]:
    cluster, moment = config.cluster, fullest(config, config.cluster.ranks)
    parts = {name: size for name, size in moment._asdict().items() if name != "name" and size}
    needed, host = plan.gpu_bytes(config) / 1e9, plan.host_bytes(config) / 1e9
    source = f"{moment.name}: {_listed(parts, 1e9)}; reserved {cluster.reserved_gb:g}"
    yield "memory of a GPU", f"{needed:.2f} GB of {cluster.memory_gb:g}", source
    source = "a checkpoint on its way to the disk, and what is offloaded"
    yield "memory of the first host", f"{host:.2f} GB of {cluster.host_memory_gb:g}", source


def traffic_rows(config: PlanConfig) -> Iterator[Row]:
    for sending in plan.sendings(config):
        calls = f"{_count(sending.calls, sending.kind)} over {sending.ranks} ranks"
        milliseconds = f"{1e3 * sending.seconds(config.cluster):.3g} ms"
        yield f"sent a rank and step: {sending.what}", in_units(sending.on_link), f"{calls}, {milliseconds}"


def time_rows(config: PlanConfig) -> Iterator[Row]:
    step, cluster = plan.step_seconds(config), config.cluster
    operator, elementwise = plan.operator_bytes_a_token(config), plan.elementwise_bytes_a_token(config)
    bandwidth = f"at {cluster.achieved_bandwidth:.0%} of {cluster.memory_gb_s:g} GB/s"
    sources = {
        "products": f"at {cluster.achieved_flops:.0%} of {plan.peak(config) / 1e12:g} TFLOP/s",
        "operator": f"{in_units(operator)} a token {bandwidth}",
        "elementwise": f"{in_units(elementwise)} a token; norms, GELU, LayerScale, residual sums, loss",
        "launching": f"{plan.OPERATIONS} operations a layer and micro-batch at {cluster.launch_us:g} µs, less these",
        "optimizer": f"{in_units(plan.optimizer_bytes(config))}, a rank's part",
        "communication": "the messages above, while nothing is computed",
    }
    for name, seconds in step._asdict().items():
        yield f"time a step: {name}", f"{1e3 * seconds:.3g} ms", sources[name]
    yield "time a step", f"{1e3 * step.total:.3g} ms", "the sum"
    rate, seconds = config.batch_tokens / step.total, step.total * config.train.steps
    utilization = plan.work(config).total * rate / (plan.peak(config) * cluster.ranks)
    yield "tokens/s", f"{rate:,.0f}", f"{rate / cluster.ranks:,.0f} a GPU; model FLOP utilization {utilization:.0%}"
    yield "the whole run", duration(seconds), f"{seconds / 3600 * cluster.ranks:,.0f} GPU hours of steps alone"


def disk_rows(config: PlanConfig) -> Iterator[Row]:
    size, rate = plan.CHECKPOINT_BYTES * parameters(config.model).total, config.cluster.disk_gb_s
    every, keep = config.checkpoint.every, config.checkpoint.keep
    writing = f"12 bytes a parameter; {size / 1e9 / rate:.2g} s at {rate:g} GB/s every {every:,} steps"
    yield "a checkpoint", in_units(size), writing
    kept = f"the newest {keep}, that of the lowest validation loss, and one being written"
    yield "checkpoints on the disk", in_units((keep + 2) * size), kept


def markdown(rows: list[Row]) -> str:
    """A table that reads well as plain text, too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [rows[0], rule, *rows[1:]])


def in_units(size: float) -> str:
    power = max(p for p in range(5) if size >= 1000**p or p == 0)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    """In the largest unit of which there is one."""
    unit, size = next(
        ((u, n) for u, n in (("days", 86400), ("hours", 3600), ("minutes", 60)) if seconds >= n), ("s", 1)
    )
    return f"{seconds / size:.3g} {unit}"


def _in_tiles(config: PlanConfig) -> str:
    count = plan.tiles(config)
    return f", in {count} tiles of {config.held_tokens:,} tokens" if count > 1 else ""


def _listed(numbers: dict[str, float], unit: float, how: str = ".2f") -> str:
    return ", ".join(f"{name} {number / unit:{how}}" for name, number in numbers.items())


def _count(number: float, what: str, plural: str = "s") -> str:
    return f"{number:,.0f} {what}{plural if number != 1 else ''}"


if __name__ == "__main__":
    run_program(main, name="pretrain.plan", doc=__doc__ or "", takes="CONFIG", config=PlanConfig)
