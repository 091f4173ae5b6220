"""The plan: what it is made of, what it says where something does not fit, and the tables in docs/plan.md."""

import re
import sys
from pathlib import Path

import pytest

from tost_lm.config import load_config
from tost_lm.errors import ConfigError
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.pretrain.commands.plan import changed_tokens, model_rows, run
from tost_lm.pretrain.plan import estimate as plan
from tost_lm.pretrain.plan import fit as plan_fit
from tost_lm.pretrain.plan import memory as plan_memory
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.memory import Moment, checkpoint_bytes, moments
from tost_lm.pretrain.plan.settings import PlanConfig

pytestmark = pytest.mark.quick

CHECKOUT = Path(__file__).parents[4]
BASE, LARGE = (CHECKOUT / f"configs/pretrain/owt_tost_{size}.toml" for size in ("base", "large"))
DELTA = CHECKOUT / "configs/pretrain/delta_350m.toml"
N = 110_384_016  # numbers trained by tost-base
TOKENS = 12 * 1024  # of its micro-batch
MANY = ("cluster.nodes=8", "parallel.sequence=64")
LAYER = 16 * 2 * 768 + 4 * 12 + 4 * (2 * 768 + 12) / 32 + 16
"""Bytes a token that one of its layers keeps: 16 tensors, Π, sums of chunks of 32 tokens and norms."""


def planned(path: Path, *overrides: str) -> PlanConfig:
    small = {BASE: ["train.micro_batch_size=12"], LARGE: ["train.micro_batch_size=3"]}
    return load_config(PlanConfig, path, [*small.get(path, []), "train.compile=false", *overrides])


def at(name: str, *overrides: str) -> Moment:
    """The moment of tost-base on 8 ranks."""
    return next(moment for moment in moments(planned(BASE, *overrides), 8) if moment.name == name)


def test_a_plain_recipe_is_planned_for_a_node_of_h100s():
    cluster = planned(BASE).cluster
    assert (cluster.preset, cluster.ranks, cluster.memory_gb, cluster.device) == (
        "h100-sxm",
        8,
        80,
        "NVIDIA H100 80GB HBM3",
    )
    other = planned(BASE, "cluster.preset=h200-sxm", "cluster.nodes=2", "cluster.memory_gb=100").cluster
    assert (other.ranks, other.memory_gb, other.memory_gb_s, other.device) == (16, 100, 4800, "NVIDIA H200")


def test_a_plan_is_for_the_ranks_that_are_started_or_8_gpus_of_each_node():
    words = ([], ["launch.ranks=4"], ["launch.ranks=4", "cluster.gpus_per_node=2"], ["cluster.nodes=2"])
    assert [planned(BASE, *some).cluster.ranks for some in words] == [8, 4, 2, 16]


def test_memory_of_bfloat16_by_stage():
    weights, part = 2 * N, N / 8
    by_stage = {stage: at("at the loss", f"parallel.zero_stage={stage}") for stage in (1, 2, 3)}
    assert [by_stage[stage].weights for stage in (1, 2, 3)] == [weights, weights, weights + 2 * part]
    assert {moment.optimizer for moment in by_stage.values()} == {12 * part}
    assert [by_stage[stage].gradients for stage in (1, 2, 3)] == [4 * N, 4 * part, 4 * part]
    # A tile's logits; the gradient of the head's weight, and the tile's; the head's input and its gradient.
    in_portion = 2**30 + 2 * 768 * 2**30 / (2 * 50304)
    assert {moment.loss for moment in by_stage.values()} == {in_portion + 6 * 50304 * 768 + 2 * 2 * 768 * TOKENS}
    assert by_stage[1].activations == (12 * LAYER + 2 * 768) * TOKENS


def test_buffers_of_gradients_by_stage_and_dtype():
    """Two buckets of 40 million gradients at stages 1 and 2, one at stage 3; none for bfloat16 at stage 1."""
    buckets = {
        (dtype, stage): at(
            "at the start of the blocks' backward", f"parallel.zero_stage={stage}", f"train.dtype={dtype}"
        ).buffers
        for dtype in ("bfloat16", "float32")
        for stage in (1, 2, 3)
    }
    assert list(buckets.values()) == [0, 2 * 2 * 40e6, 4 * 40e6, 2 * 4 * 40e6, 2 * 4 * 40e6, 4 * 40e6]
    largest = 50304 * 1280
    large = moments(planned(LARGE, "parallel.zero_stage=3"), 8)
    assert {moment.buffers for moment in large[:1]} == {4 * largest}


def loss_of_one_portion(tokens: float, words: float) -> float:
    return 2 * words * tokens + 6 * words * 768 + 3 * 2 * 768 * tokens


def test_ranks_that_share_the_model_or_the_tokens_hold_less():
    whole, tokens, heads = (
        at("at the loss", words) for words in ("run.name=x", "parallel.sequence=2", "parallel.tensor=2")
    )
    assert tokens.loss == loss_of_one_portion(TOKENS / 2, 50304)
    assert tokens.activations == whole.activations / 2
    assert heads.loss == loss_of_one_portion(TOKENS, 50304 / 2)
    assert heads.weights < whole.weights * 0.51
    assert heads.activations == whole.activations / 2


def test_a_portion_of_logits_is_as_large_as_the_loss_makes_it():
    few = "train.micro_batch_size=1", "train.global_batch_size=8", "train.seq_len=512"
    assert at("at the loss", *few).loss == loss_of_one_portion(512, 50304)


def test_blocks_computed_again_keep_their_input_and_mlps_in_portions_theirs():
    last_norm, mlp = 2 * 768, 11 * 2 * 768 + 8
    blocks, mlps, both = (
        "memory.activation_checkpointing=full",
        "memory.mlp_tile_tokens=256",
        ("memory.activation_checkpointing=full", "memory.mlp_tile_tokens=256"),
    )
    for words, a_layer in (((blocks,), 4 * 768), ((mlps,), LAYER - mlp + 4 * 768), (both, 4 * 768)):
        assert at("at the loss", *words).activations == (12 * a_layer + last_norm) * TOKENS
    begins = "at the start of the blocks' backward"
    kept = at("at the loss", blocks).activations
    # All of one block, and the gradients in its MLP; in tiles these are of 12 × 256 tokens.
    assert at(begins, blocks).activations == kept + (LAYER + 4 * 2 * 768) * TOKENS
    in_portions = (LAYER - mlp + 4 * 768 + 3 * 2 * 768) * TOKENS + (mlp + 4 * 2 * 768) * 12 * 256
    assert at(begins, *both).activations == kept + in_portions


def test_recomputed_blocks_keep_what_they_received():
    hybrid = ("model.pattern=TA", "model.softmax.rope_theta=10000", "parallel.sequence=2")
    apart = at("at the loss", *hybrid, "memory.activation_checkpointing=full").activations
    # Six A layers: keys and values of both ranks.
    assert apart == (12 * 4 * 768 + 2 * 768 + 6 * 4 * 2 * 768) * TOKENS / 2
    tensor = at("at the loss", "parallel.tensor=2", "memory.activation_checkpointing=full").activations
    # The softmax over heads: a float32 number a token of each rank.
    assert tensor == (12 * 2 * 768 + 768 + 12 * 8) * TOKENS


def test_what_lies_on_the_host_does_not_lie_on_the_gpu():
    here = planned(BASE, "parallel.zero_stage=2")
    offloaded = planned(BASE, "parallel.zero_stage=2", "parallel.offload=optimizer")
    assert {moment.optimizer for moment in moments(offloaded, 8)} == {0}
    assert plan_fit.host_bytes(here) == 12 * N
    assert plan_fit.host_bytes(offloaded) == 12 * N + 8 * 16 * N / 8
    assert plan_fit.host_bytes(planned(BASE, "checkpoint.asynchronous=false")) == 0


def test_muon_keeps_one_momentum_of_each_matrix():
    muon = ("optim.kind=muon", "parallel.zero_stage=0", "train.dtype=float32", "train.micro_batch_size=1")
    matrices = 12 * 10 * 768**2  # in a layer: two in the mixer, of 1, and two in the MLP, of 4
    adamw = planned(BASE, *muon[1:])
    config = planned(BASE, *muon)
    assert (at("at the loss", *muon[1:]).optimizer, at("at the loss", *muon).optimizer) == (8 * N, 8 * N - 4 * matrices)
    assert (checkpoint_bytes(adamw), checkpoint_bytes(config)) == (12 * N, 12 * N - 4 * matrices)
    assert plan_fit.host_bytes(config) == checkpoint_bytes(config)
    assert (plan.update_bytes(adamw), plan.update_bytes(config)) == (28 * N, 28 * N - 8 * matrices)
    # Five iterations; of an MLP's matrix two products are four times as long.
    assert plan.update_flops(config) == 12 * 5 * 2 * (3 * 2 * 768**3 + (2 * 4 + 1) * 2 * 768**3)
    assert plan.step_seconds(config).optimizer - plan.step_seconds(adamw).optimizer == pytest.approx(
        plan.update_flops(config) / (989.4e12 * 0.7) - 8 * matrices / (3350e9 * 0.85 * ADAMW.bandwidth), rel=1e-6
    )
    layouts = {(other.parallel.tensor, other.parallel.zero_stage) for _, other in plan_fit.alternatives(config)}
    assert layouts == {(1, 0)}


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [  # at 131,072 tokens the delta layers are the smaller part of what a block computes again
        ("configs/pretrain/delta_3b_128k.toml", ["full every 2", "mixers every 1", "full every 1"]),
        ("configs/pretrain/owt_tost_base.toml", ["mixers every 1", "full every 2", "full every 1"]),
    ],
)
def test_the_checkpointing_that_recomputes_least_is_proposed_first(recipe: str, kinds: list[str]):
    config = planned(CHECKOUT / recipe, "memory.activation_checkpointing=none", "train.compile=false")
    memories = [other.memory for changes, other in plan_fit.alternatives(config) if "checkpointing" in changes]
    found = [f"{memory.activation_checkpointing} every {memory.activation_checkpointing_every}" for memory in memories]
    assert found == kinds


def test_sequence_ranks_send_statistics_and_tensor_ranks_activations():
    nothing_shared = {one.content for one in traffic.collectives(planned(BASE))}
    assert nothing_shared == {"gradients", "weights"}
    [statistics] = [x for x in traffic.collectives(planned(BASE, *MANY)) if "statistics" in x.content]
    # One data rank: 40 micro-batches of 12 sequences, 12 layers.
    once = 40 * 12 * 12 * 8 * (2 * 768 + 12)
    assert (statistics.kind, statistics.calls, statistics.input_bytes) == ("all-to-all", 40 * 12 * 8, 2 * once)
    assert statistics.sent_bytes == 63 / 64 * 2 * once
    longer = planned(BASE, *MANY, "model.max_positions=65536", "train.seq_len=65536")
    assert statistics in traffic.collectives(longer)
    [fewer] = [x for x in traffic.collectives(planned(BASE, "parallel.sequence=4")) if "statistics" in x.content]
    # Two data ranks.
    assert (fewer.kind, fewer.calls, fewer.input_bytes) == ("all-gather", 20 * 12 * 4, once / 2)
    assert fewer.sent_bytes == 3 * fewer.input_bytes


def test_what_a_rank_sends_of_statistics_hardly_grows_with_the_ranks():
    many = planned(BASE, "cluster.nodes=128", "train.micro_batch_size=1", "parallel.sequence=1024")
    [statistics] = [x for x in traffic.collectives(many) if "statistics" in x.content]
    of_layer = statistics.sent_bytes / (480 * 12)
    assert of_layer == 1023 / 1024 * 2 * 8 * (2 * 768 + 12)


def test_statistics_of_tiles():
    """Three forwards and two backwards of two tiles, in place of one each, and with states three rows, not two."""
    whole, tiled = (planned(BASE, *MANY, *words) for words in ([], ["memory.tile_tokens=512"]))
    sent = [x.input_bytes for one in (whole, tiled) for x in traffic.collectives(one) if "statistics" in x.content]
    assert sent[1] == 2.5 * 3 / 2 * sent[0]
    assert plan_memory.tile_states_bytes(tiled) == 2 * 12 * 12 * 4 * (2 * 768 + 12)


def test_compiled_blocks_that_are_computed_again_receive_again():
    words = ("parallel.sequence=8", "memory.activation_checkpointing=full")
    kept, again = (
        next(x for x in traffic.collectives(planned(BASE, *words, *more)) if "statistics" in x.content)
        for more in ([], ["train.compile=true"])
    )
    assert (again.calls, again.input_bytes) == (1.5 * kept.calls, 1.5 * kept.input_bytes)


def test_launches_are_those_of_the_layers_of_the_sums_and_of_the_update():
    assert plan.operations_per_layer(planned(BASE)) == 65
    assert plan.operations_per_layer(planned(BASE, "model.pattern=TD", "parallel.sequence=8")) == (65 + 174) / 2
    of_micro_batch = plan.MODEL_LAUNCHES + 2 * 7  # the gradients of tost-base are cast in seven portions
    assert plan.launches(planned(BASE)) == 5 * (12 * 65 + of_micro_batch) + plan.UPDATE_LAUNCHES
    assert plan.launches(planned(BASE, "train.compile=true")) == 5 * (12 * 48 + of_micro_batch) + plan.UPDATE_LAUNCHES


def test_links_between_nodes_are_shared_by_the_groups_of_a_node():
    cluster = planned(BASE, "cluster.nodes=2", "cluster.latency_us=0", "cluster.achieved_bandwidth=1").cluster
    inside = traffic.Collectives("x", "all-gather", 1, 450e9 / 7, ranks=8, stride=1)
    across = traffic.Collectives("x", "all-gather", 1, 400e9 / 15, ranks=16, stride=1)
    side_by_side = traffic.Collectives("x", "all-gather", 1, 50e9, ranks=2, stride=8)
    assert [one.seconds(cluster) for one in (inside, across, side_by_side)] == pytest.approx([1, 1, 1])
    assert traffic.Collectives("x", "all-reduce", 1, 4e9, 4, 1).sent_bytes == 6e9
    assert traffic.Collectives("x", "reduce-scatter", 1, 4e9, 4, 1).sent_bytes == 3e9
    assert traffic.Collectives("x", "all-to-all", 1, 4e9, 4, 1).sent_bytes == 3e9
    # All eight ranks of a node send to the other one at once.
    assert traffic.Collectives("x", "all-to-all", 1, 50e9 * 16 / 15, 16, 1).seconds(cluster) == pytest.approx(1)


def test_what_is_computed_again_takes_time():
    def work_again(*words: str) -> float:
        again = traffic.recomputed_flops(planned(BASE, *words))
        return again.products / plan.model_flops(planned(BASE)).products.forward

    mlps, mixers = 12 * 8 * 768**2, 12 * 2 * 768**2
    whole = mlps + mixers + 50304 * 768
    blocks, portions = "memory.activation_checkpointing=full", "memory.mlp_tile_tokens=256"
    assert work_again() == 0
    assert work_again(blocks) == pytest.approx((mlps + mixers) / whole)
    assert work_again(portions) == pytest.approx(mlps / whole)
    # Of four portions the last is not computed when the block is, only when its own backward comes.
    assert work_again(blocks, portions) == pytest.approx((1.75 * mlps + mixers) / whole)


def test_time_follows_from_the_figures_of_the_cluster():
    step = plan.step_seconds(planned(BASE))
    assert step.products == pytest.approx(656_474_112 * 491_520 / 8 / (989.4e12 * 0.7))
    in_kernels = 12 * (24.75 * 768 + 28 * 12) * 491_520 / 8 / (3350e9 * 0.85 * 0.6)
    assert step.operator == pytest.approx(in_kernels + 5 * 12 * (33 - 6) * plan.KERNEL_SECONDS)
    assert step.launches == 0
    assert plan.step_seconds(planned(BASE, "cluster.achieved_flops=0.35")).products == pytest.approx(2 * step.products)
    assert plan.step_seconds(planned(BASE, "cluster.launch_us=1000")).launches > step.total
    faster = planned(BASE, "cluster.device=new", "cluster.peak_tflops=1978.8")
    assert plan.step_seconds(faster).products == pytest.approx(step.products / 2)
    with pytest.raises(ConfigError, match=r"cluster.device 'new': its peak FLOP/s is unknown; set cluster.peak_tflops"):
        plan.step_seconds(planned(BASE, "cluster.device=new"))


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["train.micro_batch_size=60"], "train.micro_batch_size=30"),
        (["cluster.memory_gb=14"], "train.micro_batch_size=2"),
        (["cluster.memory_gb=8.5"], "train.micro_batch_size=1 parallel.sequence=2 parallel.zero_stage=2"),
    ],
)
def test_what_does_not_fit_comes_with_settings_that_do(overrides: list[str], remedy: str):
    config = planned(LARGE, *overrides)
    problem = plan_fit.memory_problem(config)
    assert problem
    assert f"; set {remedy} (" in problem
    assert plan_fit.memory_problem(planned(LARGE, *overrides, *remedy.split())) is None


def test_where_nothing_fits_it_says_so():
    problem = plan_fit.memory_problem(planned(LARGE, "cluster.memory_gb=5"))
    assert problem
    assert "raise cluster.nodes or choose larger GPUs" in problem
    problem = plan_fit.memory_problem(planned(LARGE, "cluster.host_memory_gb=7"))
    assert problem == (
        "a node needs 8 GB, more than cluster.host_memory_gb 7; "
        "set checkpoint.asynchronous=false or parallel.offload=none"
    )


def test_a_batch_that_ranks_cannot_divide_names_settings_that_they_can():
    with pytest.raises(ConfigError, match="480 is not divisible by 512 data ranks") as error:
        planned(BASE, "cluster.nodes=64").accumulation(512)
    first, other = str(error.value).split(": set ")[1].split(", or ")
    assert first == "parallel.sequence=16 train.micro_batch_size=5"
    for words in (first, other):
        assert planned(BASE, "cluster.nodes=64", *words.split()).accumulation(512)
    with pytest.raises(ConfigError, match=r"set train.micro_batch_size=10, or train.global_batch_size=528$"):
        planned(BASE, "train.micro_batch_size=11").accumulation(16)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "train.seq_len=32768",
            "train.seq_len: 4096 → 32768 multiplies the tokens by 8, from 7.424 G to 59.39 G; set "
            "train.batch_tokens=524288 to keep them",
        ),
        (
            "train.global_batch_size=256",
            "train.global_batch_size: 128 → 256 multiplies the tokens by 2, from 7.424 G to 14.85 G; set "
            "train.tokens=7423918080 to keep them",
        ),
    ],
)
def test_overrides_that_change_the_tokens_come_with_one_that_keeps_them(tmp_path: Path, words: str, problem: str):
    in_steps = tmp_path / "steps.toml"
    in_steps.write_text(DELTA.read_text().replace("\ntokens = 7_423_918_080", "\nsteps = 14160"))
    assert changed_tokens(in_steps, planned(in_steps, words)) == problem
    fix = problem.split("; set ")[1].split()[0]
    for kept in (planned(in_steps, words, fix), planned(DELTA, words)):
        assert kept.train.steps * kept.batch_tokens == 7_423_918_080
        assert changed_tokens(in_steps, kept) is None


def test_a_number_of_tokens_that_was_chosen_is_no_change(tmp_path: Path):
    for words in ([], ["train.steps=100"], ["train.tokens=7e9"], ["train.tokens=7e9", "train.seq_len=2048"]):
        assert changed_tokens(DELTA, planned(DELTA, *words)) is None
    part = tmp_path / "part.toml"
    part.write_text(DELTA.read_text().replace("seq_len = 4096", ""))
    assert changed_tokens(part, planned(part, "train.seq_len=2048")) is None


def test_the_first_row_has_the_tokens_of_the_run_of_a_step_and_of_a_parameter():
    assert next(model_rows(planned(DELTA))) == (
        "tokens", "7.424 G", "14,160 steps of 524,288; 20 per parameter",
    )  # fmt: skip
    short = planned(DELTA, "train.tokens=5e8", "optim.warmup_steps=10")
    assert next(model_rows(short)) == ("tokens", "500.2 M", "954 steps of 524,288; 1.35 per parameter")


def test_the_tables_in_the_documentation_are_those_of_their_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    text = (CHECKOUT / "docs/plan.md").read_text()
    found = re.findall(r"```bash\ntost plan (\S+)((?: \S+)*)\n```\n\n((?:\|.*\n)+)", text)
    assert len(found) == 8
    monkeypatch.chdir(tmp_path)
    for path, words, table in found:
        monkeypatch.setattr(sys, "argv", ["plan", str(CHECKOUT / path), *words.split()])
        with pytest.raises(SystemExit):
            run()
        assert capsys.readouterr().out == table
