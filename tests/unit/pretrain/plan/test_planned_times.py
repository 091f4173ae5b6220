"""The rows of planned times beside what one H200 has measured, in `results/benchmarks/gpu_nvidia-h200.json`: all
kernels of the steps of tost-base and delta-350m at the size of their recipes, and operators and loss apart from a
step."""

import json
from typing import Any

import pytest

from benchmarks.launches import PASSES
from benchmarks.measure import CHECKOUT
from tost_lm.config import load_config
from tost_lm.mixers.softmax.spec import SOFTMAX
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.pretrain.plan import estimate as plan
from tost_lm.pretrain.plan.activations import costs_of
from tost_lm.pretrain.plan.groups import groups_of
from tost_lm.pretrain.plan.memory import peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig

pytestmark = pytest.mark.quick

RECORD = json.loads((CHECKOUT / "results/benchmarks/gpu_nvidia-h200.json").read_text())
CELLS = [cell for cell in RECORD["cells"] if "case" in cell]
C, V, LAYERS, TOKENS = 768, 50304, 12, 12 * 1024
COPY = next(cell["bytes_per_second"] for cell in CELLS if cell["case"] == "copy")
ROWS = {
    "products": ("matrix products",),
    "operator": ("token mixers",),
    "elementwise": ("norms and pointwise", "norms and pointwise, compiled", "copies and fills", "others"),
    "loss": ("loss",),
    "optimizer": ("optimizer",),
}
"""Classes of kernels of a row."""
LAUNCHES = json.loads(next((CHECKOUT / "results/benchmarks").glob("launches_*.json")).read_text())
GENERATED = [cell for cell in LAUNCHES["cells"] if "preset" in cell]
REACHED = 0.93
"""Fraction of a copy's bandwidth that the generated kernels of the stored step of delta-350m reached, without those
that computed several gradients at once: 55.3 ms for 219 GB."""
ROUNDED = 24
"""Bytes per channel of queries and keys, and of their gradients, that the stored step copied to round them."""


OLMO_HYBRID = (
    "model.norm=rms", "model.norm_after=A", "model.delta.beta_to_two=true", "model.softmax.qk_norm=all-heads",
    "model.softmax.gate=false", "model.softmax.rope_theta=0",
)  # fmt: skip
"""The form of delta-350m when it was measured."""


def planned(recipe: str, rows: int, words: tuple[str, ...] = ()) -> PlanConfig:
    sizes = (f"train.micro_batch_size={rows}", f"train.global_batch_size={rows}")
    cluster = ("cluster.preset=h200-sxm", "cluster.gpus_per_node=1")
    return load_config(PlanConfig, CHECKOUT / f"configs/pretrain/{recipe}.toml", [*sizes, *cluster, *words])


def seconds_of(case: str) -> float:
    """Seconds of the kernels of a call, or of the call."""
    cell = next(cell for cell in CELLS if cell["case"].startswith(case))
    return cell.get("kernel_seconds", cell.get("seconds"))


def measured_rows(cell: dict[str, Any]) -> dict[str, float]:
    return {row: sum(cell["classes"].get(name, (0.0, 0))[0] for name in names) for row, names in ROWS.items()}


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_every_row_of_a_step(how: str):
    cell = next(cell for cell in CELLS if cell["case"] == f"tost-base, 60 × 1,024 tokens, {how}, DeepSpeed")
    config = planned("owt_tost_base", 60, (f"train.compile={str(how == 'compiled').lower()}",))
    step, measured = plan.step_seconds(config), measured_rows(cell)
    # DeepSpeed's kernels work on all parameters at once.
    step = step._replace(optimizer=step.optimizer - plan.update_launches(config) * plan.KERNEL_SECONDS)
    assert sum(measured.values()) == pytest.approx(cell["kernel_seconds"])
    assert {row: getattr(step, row) for row in ROWS} == pytest.approx(measured, rel=0.15)
    # The planned step has no time in which the GPU waits for the host between kernels.
    assert sum(step[:-2]) == pytest.approx(cell["kernel_seconds"], rel=0.1)


def test_the_rows_of_a_step_of_delta_layers():
    """Names of kernels do not tell what is between the projections of a D layer from norms and sums of gradients.

    Since that step, Inductor generates other kernels for a block: their counted bytes replace the measured time.
    """
    cell = next(cell for cell in CELLS if cell["case"].startswith("delta-350m, 2 × 8 × 4,096 packed tokens, compiled"))
    config = planned("delta_350m", 8, (*OLMO_HYBRID, "train.global_batch_size=16"))
    step, measured, model = plan.step_seconds(config), measured_rows(cell), config.model
    per_channel = {one["model"]: sum(one[name]["bytes_per_channel"] for name in PASSES) for one in GENERATED}
    per_layer = {"D": per_channel["D"] / REACHED - ROUNDED, "A": per_channel["A"] / REACHED}
    generated = sum(per_layer[letter] for letter in model.letters) * model.width * cell["tokens"] / COPY
    measured["elementwise"] += generated - cell["classes"]["norms and pointwise, compiled"][0]
    beside = ("operator", "elementwise", "loss", "optimizer")
    assert sum(getattr(step, row) for row in beside) == pytest.approx(sum(measured[row] for row in beside), rel=0.15)
    assert step.products == pytest.approx(measured["products"], rel=0.15)
    # The documents of the measured step are shorter than its rows, which the plan counts whole.
    assert 0.4 * step.attention < cell["classes"]["attention"][0] < step.attention


@pytest.mark.parametrize(("case", "recipe", "rows", "form"), [
    ("tost-base, 60 × 1,024 tokens, compiled", "owt_tost_base", 60, ()),
    ("delta-350m, 2 × 8 × 4,096 packed tokens, compiled", "delta_350m", 8, OLMO_HYBRID),
])  # fmt: skip
def test_memory_of_a_step(case: str, recipe: str, rows: int, form: tuple[str, ...]):
    """Beside weights and optimizer; DeepSpeed keeps the buffers of the gradients."""
    cell = next(cell for cell in CELLS if cell["case"].startswith(case))
    moment = peak_moment(planned(recipe, rows, form), 1)
    assert moment.activations + moment.loss == pytest.approx(cell["peak_bytes"], rel=0.05)


@pytest.mark.parametrize(("rows", "tokens"), [(12, 1024), (1, 131_072)])
def test_kernels_of_tssa(rows: int, tokens: int):
    config = planned("owt_tost_base", rows, (f"train.seq_len={tokens}", f"model.max_positions={tokens}"))
    measured = LAYERS * seconds_of(f"causal TSSA, {rows} × {tokens:,} tokens, forward + backward")
    assert plan.step_seconds(config).operator == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("tokens", [1024, 131_072])
def test_kernels_of_softmax_attention(tokens: int):
    rows = max(1, TOKENS // tokens)
    words = (f"train.seq_len={tokens}", "model.pattern=A", f"model.max_positions={tokens}")
    config = planned("owt_tost_base", rows, words)
    outside = 5 * costs_of(config, SOFTMAX).stored / COPY * tokens * rows  # rotary embedding and copies
    attention = plan.step_seconds(config).attention / LAYERS
    attention += outside / SOFTMAX.kernel_bandwidth - outside
    measured = seconds_of(f"softmax attention, {rows} × {tokens:,} tokens, forward + backward")
    assert attention == pytest.approx(measured, rel=0.15)


def test_the_loss_and_its_products():
    config = planned("owt_tost_base", 12)
    products = 6 * TOKENS * V * C / (plan.peak(config) * config.cluster.achieved_flops)
    measured = seconds_of("tost_lm, 12,288 tokens, vocabulary 50,304, forward + backward")
    assert plan.step_seconds(config).loss + products == pytest.approx(measured, rel=0.15)


def test_the_update_at_the_bandwidth_of_a_copy():
    name = "tost-base, 60 × 1,024 tokens, compiled, DeepSpeed"
    kernels = next(cell for cell in CELLS if cell["case"] == name)["kernels"]
    adamw = sum(seconds for kernel, seconds, _ in kernels if "FusedAdam" in kernel or "FusedOptimizer" in kernel)
    parameters = groups_of(planned("owt_tost_base", 60), 1).total.numbers
    assert 28 * parameters / adamw / COPY == pytest.approx(ADAMW.bandwidth, rel=0.15)
