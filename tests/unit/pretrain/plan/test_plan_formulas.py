"""The plan: what it is made of, and what it says where something does not fit."""

from pathlib import Path

import pytest

from tost_lm.config import load_config
from tost_lm.errors import ConfigError
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.pretrain.plan import estimate as plan
from tost_lm.pretrain.plan import fit as plan_fit
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.memory import Moment, checkpoint_bytes, moments, peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig

pytestmark = pytest.mark.quick

CHECKOUT = Path(__file__).parents[4]
BASE, LARGE = (CHECKOUT / f"configs/pretrain/owt_tost_{size}.toml" for size in ("base", "large"))
N = 110_384_016  # numbers trained by tost-base
PADDED = N + 12 * 4 * (1024 + 1)  # biases and temperatures of 12 heads on 8 ranks
TOKENS = 12 * 1024  # of its micro-batch
LAYER = 16 * 2 * 768 + 4 * 12 + 4 * (2 * 768 + 12) / 32 + 16
"""Bytes a token that one of its layers keeps: 16 tensors, Π, sums of chunks of 32 tokens and norms."""


def planned(path: Path, *overrides: str) -> PlanConfig:
    small = {BASE: ["train.micro_batch_size=12"], LARGE: ["train.micro_batch_size=3"]}
    always = ["train.compile=false", "parallel.engine=fsdp"]
    return load_config(PlanConfig, path, [*small.get(path, []), *always, *overrides])


def at(name: str, *overrides: str) -> Moment:
    """The moment of tost-base on 8 ranks."""
    return next(moment for moment in moments(planned(BASE, *overrides), 8) if moment.name == name)


def test_a_plan_is_for_the_ranks_that_are_started_or_8_gpus_of_each_node():
    words = ([], ["launch.ranks=4"], ["launch.ranks=4", "cluster.gpus_per_node=2"], ["cluster.nodes=2"])
    assert [planned(BASE, *some, "launch.cpu_ranks=2").cluster.ranks for some in words] == [2, 4, 2, 4]
    assert [planned(BASE, *some).cluster.ranks for some in words] == [8, 4, 2, 16]


def test_a_run_records_its_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config, words = planned(BASE), ["train.micro_batch_size=12", "train.compile=false"]
    run = load_config(PretrainConfig, BASE, words)
    memory = {"memory_peak_bytes": peak_moment(config, 8).total}
    rate = config.batch_tokens / plan.step_seconds(config).total
    assert plan_fit.plan_of_run(run, 8, "cpu") == memory
    assert plan_fit.plan_of_run(run, 8, config.cluster.device) == {**memory, "tokens_per_second": rate}


def test_memory_of_bfloat16_by_stage():
    whole, part = 2 * PADDED, PADDED / 8
    by_stage = {stage: at("at the loss", f"parallel.zero_stage={stage}") for stage in (1, 2, 3)}
    root = 2 * 768 * (50304 + 1024 + 1)  # embedding, positions and a norm
    assert [by_stage[stage].weights - 4 * part for stage in (1, 2, 3)] == [whole, whole, root]
    assert {moment.optimizer for moment in by_stage.values()} == {8 * part}
    assert [by_stage[stage].gradients for stage in (1, 2, 3)] == [4 * PADDED, 4 * part, 4 * part]
    # A tile's logits; the gradient of the head's weight, and the tile's; the head's input and its gradient.
    in_portion = 2 * (50304 + 768) * (2**30 // (2 * 50304))
    assert {moment.loss for moment in by_stage.values()} == {in_portion + 6 * 50304 * 768 + 2 * 2 * 768 * TOKENS}
    assert by_stage[1].activations == (12 * LAYER + 2 * 768) * TOKENS


def test_what_lies_on_the_host_does_not_lie_on_the_gpu():
    here = planned(BASE, "parallel.zero_stage=2")
    offloaded = planned(BASE, "parallel.zero_stage=2", "parallel.offload=optimizer")
    assert {moment.optimizer for moment in moments(offloaded, 8)} == {0}
    assert plan_fit.host_bytes(here) == 12 * N
    assert plan_fit.host_bytes(offloaded) == 12 * N + 8 * 16 * PADDED / 8
    assert plan_fit.host_bytes(planned(BASE, "cluster.nodes=2")) == 12 * N / 2


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
        plan.update_flops(config) / (989.4e12 * 0.72) - 8 * matrices / (3350e9 * 0.85 * ADAMW.bandwidth), rel=1e-6
    )
    layouts = {(other.parallel.tensor, other.parallel.zero_stage) for _, other in plan_fit.alternatives(config)}
    assert layouts == {(1, 0)}


def test_links_between_nodes_are_shared_by_the_groups_of_a_node():
    cluster, second = planned(BASE, "cluster.nodes=2", "cluster.achieved_bandwidth=1").cluster, pytest.approx(1, 1e-3)
    inside = traffic.Collectives("x", "all-gather", 1, 450e9 / 7, ranks=8, stride=1)
    across = traffic.Collectives("x", "all-gather", 1, 400e9 / 15, ranks=16, stride=1)
    side_by_side = traffic.Collectives("x", "all-gather", 1, 50e9, ranks=2, stride=8)
    assert [one.seconds(cluster) for one in (inside, across, side_by_side)] == 3 * [second]
    assert traffic.Collectives("x", "all-reduce", 1, 4e9, 4, 1).sent_bytes == 6e9
    assert traffic.Collectives("x", "reduce-scatter", 1, 4e9, 4, 1).sent_bytes == 3e9
    assert traffic.Collectives("x", "all-to-all", 1, 4e9, 4, 1).sent_bytes == 3e9
    # All eight ranks of a node send to the other one at once.
    assert traffic.Collectives("x", "all-to-all", 1, 50e9 * 16 / 15, 16, 1).seconds(cluster) == second


def test_the_latency_of_collectives_grows_with_ranks_and_nodes():
    cluster = planned(BASE, "cluster.nodes=16").cluster

    def latency(kind: traffic.Kind, ranks: int, stride: int = 1) -> float:
        return 1e6 * traffic.Collectives("x", kind, 1, 0, ranks, stride).seconds(cluster)

    assert latency("all-gather", 8) == pytest.approx(6.6 + 7 * 0.6)
    assert latency("reduce-scatter", 16) == pytest.approx(6.6 + 14 * 0.6 + 2.7)
    assert latency("all-gather", 16, stride=8) == pytest.approx(6.6 + 15 * 2.7)
    assert latency("all-reduce", 8) == pytest.approx(6.6 + 14 * 0.6)
    assert latency("all-reduce", 128) == pytest.approx(6.8 + 2 * (7 * 0.6 + 4 * 5))  # a tree; a ring has 254 steps
    assert latency("all-to-all", 8) == pytest.approx(6.6 + 0.6)
    assert latency("all-to-all", 128) == pytest.approx(6.6 + 2.7 + 120)
    # Large messages take the protocol with the whole bandwidth, whose steps are the slowest.
    large = traffic.Collectives("x", "all-gather", 2, 2e9, 8, 1)
    assert large.seconds(cluster) == pytest.approx(14e9 / (450e9 * 0.7) + 2e-6 * (8.4 + 7 * 3.4))


def test_what_lies_on_the_host_is_copied_for_each_gather_reduction_and_tile():
    tiled, words = "memory.tile_tokens=256", ("parallel.zero_stage=2", "parallel.sequence=8")
    assert traffic.copied_bytes(planned(BASE, *words, tiled)) == 0
    offloaded = planned(BASE, *words, tiled, "parallel.offload=optimizer")
    backwards = 4 * offloaded.micro_batches
    assert traffic.copied_bytes(offloaded) == 4 * PADDED / 8 * (1 + backwards)
    assert plan.step_seconds(offloaded).copies == traffic.copied_bytes(offloaded) / (64e9 * 0.7)
    # There, the update reads and writes at the host's bandwidth, which 8 ranks share.
    here = plan.step_seconds(planned(BASE, *words, tiled)).optimizer
    assert plan.step_seconds(offloaded).optimizer > 10 * here
    on_host = ("memory.offload_tile_states=true", "parallel.tensor=1", "train.micro_batch_size=1")
    states = planned(BASE, tiled, *on_host)
    of_tssa = 12 * 4 * (2 * 768 + 12) * states.micro_batches
    assert traffic.copied_bytes(states) == 2 * 3 * of_tssa
    # Keys and values of a tile: there once; of 6 pairs of tiles twice to the GPU, and gradients from it in float32, and
    # of 3 in the first pass.
    growing = planned(BASE, tiled, *on_host, "model.pattern=A", "train.seq_len=1024")
    keys = 12 * 2 * 2 * 768 * 256 * growing.micro_batches
    assert traffic.copied_bytes(growing) == keys * (3 + 3 + 6 * (2 + 2))
    of_tiles = 8 * 4 * 12 * 2 * (2 + 4) * 768 * 256  # of 8 ranks, with gradients
    assert plan_fit.host_bytes(growing) - checkpoint_bytes(growing) == of_tiles


def test_heads_of_64_channels_are_slower_than_those_of_128_and_256():
    rates = [
        plan.attention_rate(planned(BASE, "model.pattern=A", f"model.heads={768 // head}", f"cluster.preset={gpu}"))
        for gpu in ("h100-sxm", "a100-sxm")
        for head in (64, 128, 256)
    ]
    assert rates == pytest.approx([0.35 * 0.7, 0.35, 0.35, 0.35 * 0.87, 0.35, 0.35])


def test_blocks_are_sent_behind_what_is_computed():
    """At stage 1, gradients behind the last of the backwards, which take two thirds of the time and are slowed down."""
    config, slowed = planned(LARGE), plan.SLOWED
    seconds: dict[str | None, float] = {None: 0.0, "forward": 0.0, "backward": 0.0}
    for one in traffic.collectives(config):
        seconds[one.during] += one.seconds(config.cluster)
    half = seconds["backward"] / 2
    exposed = [plan.exposed_seconds(config, computed) for computed in (0.0, 1.5 * half * config.micro_batches, 1e9)]
    behind = {"backward": half, "forward": half / 2}
    partly = sum(max(slowed * seconds[name], seconds[name] - (1 - slowed) * hidden) for name, hidden in behind.items())
    hidden = slowed * (seconds["forward"] + seconds["backward"])
    assert exposed == pytest.approx([sum(seconds.values()), seconds[None] + partly, seconds[None] + hidden])
    assert seconds[None] < sum(seconds.values()) / 2


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["train.micro_batch_size=60"], "train.micro_batch_size=30"),
        (["cluster.memory_gb=14"], "train.micro_batch_size=2"),
        (["cluster.memory_gb=7"], "train.micro_batch_size=1 parallel.sequence=2 parallel.zero_stage=3"),
        (
            ["train.micro_batch_size=1", "train.seq_len=8192", "model.max_positions=8192", "cluster.memory_gb=18"],
            "memory.mlp_tile_tokens=2048",
        ),
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
        "a node needs 8 GB, more than cluster.host_memory_gb 7; raise cluster.nodes or set parallel.offload=none"
    )


def test_the_gpu_has_the_kernels_of_attention():
    assert plan.peak(planned(BASE, "train.attention=fa3")) == plan.peak(planned(BASE))
    with pytest.raises(ConfigError, match=r"^train\.attention fa3: for Hopper GPUs only, not NVIDIA B200; "):
        plan.peak(planned(BASE, "train.attention=fa3", "cluster.preset=b200-sxm"))


def test_a_batch_that_ranks_cannot_divide_names_settings_that_they_can():
    with pytest.raises(ConfigError, match="480 is not divisible by 512 data ranks") as error:
        planned(BASE, "cluster.nodes=64").accumulation(512)
    first, other = str(error.value).split(": set ")[1].split(", or ")
    assert first == "parallel.sequence=16 train.micro_batch_size=5"
    for words in (first, other):
        assert planned(BASE, "cluster.nodes=64", *words.split()).accumulation(512)
    with pytest.raises(ConfigError, match=r"set train.micro_batch_size=10, or train.global_batch_size=528$"):
        planned(BASE, "train.micro_batch_size=11").accumulation(16)
