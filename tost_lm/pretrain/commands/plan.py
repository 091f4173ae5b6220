"""Plan the resources of a run before a GPU is rented: memory, traffic, time and disk space.

    tost plan configs/pretrain/owt_tost_base.toml cluster.nodes=2 train.micro_batch_size=5

    tost plan CONFIG parallel.sequence=1,2,4,8      (a row for each value)

    tost plan Qwen3.5-4B                            (a folder of the Hugging Face library, or of a model of ours)

It takes the arguments of `tost train` and the cluster in cluster.…, prints a table and writes nothing. If the run
does not fit, it prints one line with settings that fit and exits with 2. The times assume that weights and gradients of
blocks are sent while others are computed, and that hardware reaches the fractions cluster.achieved_flops and
cluster.achieved_memory_bandwidth of its published figures: compare them with the metrics.jsonl (mfu) of a first run.

In place of CONFIG, the folder of a model is planned as the recipe qwen3_5_4b without its stages, at the model's own
length and with about 32,768 tokens on a rank. Of a folder of the Hugging Face library, config.json is enough.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import leaves, load_config, recipes, toml_value
from tost_lm.errors import ConfigError
from tost_lm.model.flops import flops_per_token, parameters
from tost_lm.pretrain.plan import estimate as plan
from tost_lm.pretrain.plan import fit as plan_fit
from tost_lm.pretrain.plan.activations import costs_of, tiles
from tost_lm.pretrain.plan.memory import checkpoint_bytes, peak_moment
from tost_lm.pretrain.plan.settings import SPREAD, PlanConfig
from tost_lm.pretrain.plan.traffic import collectives, copied_bytes
from tost_lm.pretrain.settings import longer_batches
from tost_lm.remote import RemotePath

LIST = re.compile(r"[\w.]+=[^][{}\"',]+(,[^][{}\"',]+)+")
"""An override with several values, without quotes and brackets."""
OF_FOLDERS = "qwen3_5_4b"
"""The recipe whose other settings the plan of a model in a folder has."""
RANK_TOKENS, BATCH_TOKENS, MOST_RANKS = 1 << 15, 1 << 22, 8
"""Of such a plan: tokens of a rank in a micro-batch and of a step, about, and sequence ranks, at most."""
ENOUGH = 0.1
"""Fraction of the labels below which the plan warns that the documents are short."""
Row = tuple[str, str, str]
"""Quantity, value, details."""


def main(path: Path, config: PlanConfig) -> None:
    """Print the tables of all stages. Raises ConfigError, with a line for each stage that does not fit."""
    for warning in longer_batches(path, config):
        print(f"warning: {warning}", file=sys.stderr)
    problems, seconds = list[str](), 0.0
    for stage in config.in_stages():
        if config.stages:
            print(f"\n## Stage {stage.name}: steps {stage.first_step + 1:,} to {stage.config.train.steps:,}\n")
        assert isinstance(stage.config, PlanConfig)
        problem = None
        try:
            one = plan_fit.complete(stage.config)
            seconds += plan.step_seconds(one).total * stage.steps
            corpus, too_short = corpus_rows(one, stage.steps)
            if too_short:
                print(f"warning: {too_short}", file=sys.stderr)
            needs = [*memory_rows(one), *traffic_rows(one), *time_rows(one, stage.steps), *disk_rows(one)]
            print(markdown([("", "", "details"), *model_rows(one, stage.steps), *corpus, *needs]))
            problem = plan_fit.memory_problem(one)
        except ConfigError as error:
            problem = str(error)
        if problem:
            problems.append(f"stage {stage.name}: {problem}" if config.stages else problem)
    if problems:
        raise ConfigError("\n".join(problems))
    if config.stages:
        print("\n## All stages\n")
        print(markdown([("", "", "details"), *cost_rows(config, seconds)]))


def compare(path: Path, config: PlanConfig, listed: Sequence[str], others: Sequence[str]) -> None:
    """Print a row for each value of the override `listed`. Raises ConfigError if no value is possible."""
    if len(listed) > 1:
        raise ConfigError(f"several lists of values: {' '.join(listed)}; list the values of one setting")
    setting, _, values = listed[0].partition("=")
    file, given = in_place_of(path) if path.is_dir() else (path, [])
    rows, problems = list[tuple[str, ...]](), list[ConfigError]()
    for value in values.split(","):
        try:
            rows += _rows_of_stages(value, load_config(PlanConfig, file, [*given, *others, f"{setting}={value}"]))
        except ConfigError as error:
            problems.append(error)
            reason = "; ".join(str(error).replace(f"{file}: ", "").splitlines())
            rows.append((value, "impossible", *"–––––", reason))
    if len(problems) == len(rows):
        raise problems[0]
    head = (setting, "layout", "GB per GPU", "GB sent a step", "time per step", "tokens/s", "GPU hours", "fits")
    print(markdown([head, *rows]))


def _rows_of_stages(value: str, config: PlanConfig) -> Iterator[tuple[str, ...]]:
    """A row for each stage, and their sum. Raises ConfigError if a stage is impossible."""
    total = 0.0
    for stage in config.in_stages():
        assert isinstance(stage.config, PlanConfig)
        one = plan_fit.complete(stage.config)
        seconds, memory = plan.step_seconds(one).total, plan_fit.gpu_bytes(one) / 1e9
        hours = seconds * stage.steps / 3600 * one.cluster.ranks
        total += hours
        used, sent = f"{memory:.2f} of {one.cluster.memory_gb:g}", sum(c.sent_bytes for c in collectives(one)) / 1e9
        name, rate = f"{value}, {stage.name}" if config.stages else value, f"{one.batch_tokens / seconds:,.0f}"
        fits = plan_fit.memory_problem(one) or "yes"
        yield name, layout(one), used, f"{sent:.2f}", duration(seconds), rate, f"{hours:,.0f}", fits
    if config.stages:
        yield f"{value}, all stages", *"–––––", f"{total:,.0f}", ""


def in_place_of(folder: Path) -> tuple[Path, list[str]]:
    """The recipe, and overrides, that plan the model in a folder. Raises CheckpointError and ConfigError."""
    from tost_lm.inference.foreign_folder import CONFIG
    from tost_lm.interop.load import read_config

    if (folder / CONFIG).is_file():
        from tost_lm.inference.hugging_face import print_only_errors

        print_only_errors()
    model = read_config(folder)
    tree, length = model.model_dump(mode="json", exclude_defaults=True, exclude={"plugins"}), model.context_length
    at_most = lambda number: 1 << max(number, 1).bit_length() - 1  # a power of two, which layouts divide
    train = {
        "seq_len": length, "micro_batch_size": at_most(RANK_TOKENS // length),
        "global_batch_size": max(at_most(BATCH_TOKENS // length), MOST_RANKS),
    }  # fmt: skip
    settings = {
        "model": tree, "train": train, "parallel": {"sequence": min(at_most(length // RANK_TOKENS), MOST_RANKS)},
        "run": {"name": folder.resolve().name},
    }  # fmt: skip
    found = [f"{path}={toml_value(value)}" for path, value in leaves(settings)]
    return recipes()[OF_FOLDERS], ["stages=[]", "model={}", *found]


def model_rows(config: PlanConfig, steps: int) -> Iterator[Row]:
    counts, flops = parameters(config.model), flops_per_token(config.model, config.train.seq_len)
    tokens = config.batch_tokens * steps
    in_steps = f"{_count(steps, 'step')} of {config.batch_tokens:,}"
    yield "tokens", in_units(tokens, ""), f"{in_steps}; {_rounded(tokens / counts.total)} per parameter"
    yield "parameters", f"{counts.total / 1e6:.2f} M", _listed(counts._asdict(), 1e6)
    by_kind = {name: kind.total for name, kind in flops._asdict().items()}
    yield "FLOP per token", f"{flops.total / 1e9:.4g} G", f"{_listed(by_kind, 1e9, '.4g')}, with backward"
    yield "FLOP of the run", f"{flops.total * tokens:.3g}", "of all tokens"
    cluster = config.cluster
    yield "ranks", f"{cluster.ranks}", f"{_count(cluster.nodes, 'node')} of {cluster.gpus_per_node}; {layout(config)}"
    if config.parallel.engine == "deepspeed":
        yield "planned engine", "fsdp", "DeepSpeed overlaps less, and in bfloat16 stage 1 keeps whole float32 gradients"


def layout(config: PlanConfig) -> str:
    """The parallel layout and the micro-batches of a rank."""
    parallel, sequences = config.parallel, _count(config.train.micro_batch_size, "sequence")
    in_tiles = f", in {tiles(config)} tiles of {config.tile_tokens:,} tokens" if tiles(config) > 1 else ""
    return (
        f"tensor {parallel.tensor} × sequence {parallel.sequence} × data {parallel.data_ranks(config.cluster.ranks)}; "
        f"{_count(config.micro_batches, 'micro-batch', 'es')} of {sequences}{in_tiles}"
    )


def corpus_rows(config: PlanConfig, steps: int) -> tuple[list[Row], str | None]:
    """Epochs and how much of their document the labels see, and a warning where few see half of a sequence."""
    seq_len, packing, quantity = config.train.seq_len, config.data.packing, "labels that see half of seq_len"
    if missing := [path for path in config.data.folders if not isinstance(path, RemotePath) and not path.exists()]:
        return [(quantity, "unknown", f"{missing[0]} does not exist; build it with tost prepare shards")], None
    from tost_lm.data.loader import Corpora, context_sizes

    sizes = context_sizes(seq_len)
    corpora = Corpora.open(config.data.folders)
    shares = corpora.context_shares(seq_len, packing, sizes)
    details = ", ".join(f"{size:,}: {share:.1%}" for size, share in zip(sizes, shares, strict=True))
    rows = []
    for one, weight in zip(corpora.shards, corpora.weights, strict=True):
        size = one.manifest["splits"]["train"]["tokens"]
        epochs = weight * config.batch_tokens * steps / max(size, 1)
        rows.append(("epochs", _rounded(epochs), f"of {one.folder}, {in_units(size, '')} tokens"))
    seen = f"at least so many tokens of their own document: {details}; packing {packing}"
    rows.append((quantity, f"{shares[-1]:.1%}", seen))
    if shares[-1] >= ENOUGH:
        return rows, None
    others = "" if packing == "best-fit" else ", set data.packing=best-fit"
    return rows, (
        f"{shares[-1]:.1%} of the labels see {sizes[-1]:,} tokens of their own document, half of train.seq_len "
        f"{seq_len}; lower train.seq_len{others} or add longer documents"
    )


def memory_rows(config: PlanConfig) -> Iterator[Row]:
    cluster, moment = config.cluster, peak_moment(config, config.cluster.ranks)
    sizes = {name: size for name, size in moment._asdict().items() if name != "name" and size}
    needed, host = plan_fit.gpu_bytes(config) / 1e9, plan_fit.host_bytes(config) / 1e9
    source = f"{moment.name}: {_listed(sizes, 1e9)}; reserved {cluster.reserved_gb:g}"
    yield "GPU memory", f"{needed:.2f} GB of {cluster.memory_gb:g}", source
    yield "host memory of a node", f"{host:.2f} GB of {cluster.host_memory_gb:g}", "asynchronous save, offloaded states"


def traffic_rows(config: PlanConfig) -> Iterator[Row]:
    for one in collectives(config):
        calls = f"{_count(one.calls, one.kind)} over {one.ranks} ranks"
        seconds = duration(one.seconds(config.cluster))
        yield f"sent per rank and step: {one.content}", in_units(one.sent_bytes), f"{calls}, {seconds}"


def time_rows(config: PlanConfig, steps: int) -> Iterator[Row]:
    step, cluster = plan.step_seconds(config), config.cluster
    hidden = sum(one.seconds(cluster) for one in collectives(config)) - step.communication
    dealt = any(costs_of(config, spec).dealt for spec, _ in config.model.mixers)
    evenly = f"; {config.parallel.sequence} sequence ranks share heads and queries evenly" if dealt else ""
    flops, launches = plan.update_flops(config), plan.launches(config)
    in_bytes = f"gradients {in_units(plan.gradient_bytes(config))}, update {in_units(plan.update_bytes(config))}"
    host = f"{launches:,.0f} launches at {cluster.launch_us:.3g} µs, {duration(launches * cluster.launch_us * 1e-6)}"
    peak = f"of {plan.peak(config) / 1e12:g} TFLOP/s"
    elementwise = f"norms, {'GELU' if config.model.mlp == 'gelu' else 'SwiGLU'}, LayerScale, residual sums"
    bandwidth = f"at {cluster.achieved_memory_bandwidth:.0%} of {cluster.memory_gb_s:g} GB/s"
    sources = {
        "products": f"at {cluster.achieved_flops:.0%} {peak}",
        "attention": f"at {plan.attention_rate(config):.0%} {peak}{evenly}",
        "operator": f"as {in_units(plan.operator_bytes_per_token(config))} per token {bandwidth}",
        "elementwise": f"as {in_units(plan.elementwise_bytes_per_token(config))} per token; {elementwise}",
        "loss": f"{in_units(plan.bytes_moved_by_loss(config))} beside its products",
        "copies": f"{in_units(copied_bytes(config))} over {cluster.host_link_gb_s:g} GB/s to the host",
        "launches": f"{host} of the host, less the above",
        "optimizer": f"{in_bytes}{f', {flops / 1e12:.3g} TFLOP of products' if flops else ''} per rank",
        "communication": f"beside {duration(hidden)} hidden by forwards and backwards" if hidden > 0 else "no overlap",
        "imbalance": f"of {_count(cluster.nodes, 'node')}",
    }
    for name, seconds in step._asdict().items():
        yield f"time per step: {name}", duration(seconds), sources[name]
    yield "time per step", duration(step.total), f"sum{_of_published(config)}"
    rate = config.batch_tokens / step.total
    utilization = flops_per_token(config.model, config.train.seq_len).total * rate / (plan.peak(config) * cluster.ranks)
    yield "tokens/s", f"{rate:,.0f}", f"{rate / cluster.ranks:,.0f} per GPU; MFU {utilization:.0%}"
    yield from cost_rows(config, step.total * steps)


def cost_rows(config: PlanConfig, seconds: float) -> Iterator[Row]:
    """Of so many seconds of steps."""
    hours = seconds / 3600 * config.cluster.ranks
    yield "duration", duration(seconds), f"{hours:,.0f} GPU hours, steps only"
    if price := config.cluster.gpu_hour_price:
        yield "price", f"{hours * price:,.0f}", f"at {price:g} for a GPU hour"


def _of_published(config: PlanConfig) -> str:
    """How far plans for such GPUs were from published runs."""
    if config.cluster.preset not in SPREAD:
        return "; no published run on such GPUs was planned"
    least, most, rows = SPREAD[config.cluster.preset]
    return f"; planned over published tokens/s was {least:.2f} to {most:.2f} in {_count(rows, 'run')} on such GPUs"


def disk_rows(config: PlanConfig) -> Iterator[Row]:
    size, rate = checkpoint_bytes(config), config.cluster.disk_gb_s
    every, keep = config.checkpoint.interval, config.checkpoint.keep_latest_k
    each = f"{size / parameters(config.model).total:.3g} bytes per parameter"
    writing = f"{each}; {size / 1e9 / rate:.2g} s at {rate:g} GB/s every {every:,} steps"
    yield "checkpoint", in_units(size), writing
    kept = f"the newest {keep}, the one with the lowest validation loss, and one being written"
    yield "checkpoints on disk", in_units((keep + 2) * size), kept


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [rows[0], rule, *rows[1:]])


def in_units(size: float, unit: str = "B") -> str:
    power = max(p for p in range(5) if size >= 1000**p or p == 0)
    return f"{size / 1000**power:.{3 if unit == 'B' else 4}g} {('', 'k', 'M', 'G', 'T')[power]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """A duration in the largest unit that it reaches."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "s")
    return f"{seconds / units[unit]:.3g} {unit}"


def _listed(numbers: dict[str, float], unit: float, how: str = ".2f") -> str:
    return ", ".join(f"{name} {number / unit:{how}}" for name, number in numbers.items())


def _count(number: float, what: str, plural: str = "s") -> str:
    return f"{number:,.0f} {what}{plural if number != 1 else ''}"


def _rounded(ratio: float) -> str:
    return f"{ratio:,.{0 if ratio >= 10 else 2}f}"


def run() -> NoReturn:
    words = sys.argv[1:]
    listed = [word for word in words if LIST.fullmatch(word)]
    single = [word for word in words if word not in listed]
    program = partial(compare, listed=listed, others=[word for word in single if "=" in word]) if listed else main
    run_program(
        program, name="tost plan", doc=__doc__ or "", positional="CONFIG", config=PlanConfig, in_place_of=in_place_of,
        arguments=single,
    )  # fmt: skip
