"""Settings of a resource plan: those of a run, and the cluster."""

from typing import Any, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.pretrain.settings import PretrainConfig

Preset = Literal["a100-sxm", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm"]

_FIGURES = (
    "device", "memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "host_link_gb_s", "host_memory_gb_s",
    "host_memory_gb",
)  # fmt: skip
# NVIDIA's data sheets of the GPUs and of DGX A100, H100, H200 and B200, and the memory channels of their processors; of
# PCIe nodes, one adapter of 400 Gbit/s and the processors of a DGX H100.
_VALUES: dict[Preset, tuple[Any, ...]] = {
    "a100-sxm": ("NVIDIA A100-SXM4-80GB", 80, 2039, 300, 200, 32, 410, 2000),
    "h100-sxm": ("NVIDIA H100 80GB HBM3", 80, 3350, 450, 400, 64, 614, 2000),
    "h100-pcie": ("NVIDIA H100 PCIe", 80, 2000, 64, 50, 64, 614, 1000),
    "h200-sxm": ("NVIDIA H200", 141, 4800, 450, 400, 64, 614, 2000),
    "b200-sxm": ("NVIDIA B200", 180, 7700, 900, 400, 64, 717, 2000),
}
CLUSTERS: dict[Preset, dict[str, Any]] = {
    preset: dict(zip(_FIGURES, values, strict=True)) for preset, values in _VALUES.items()
}
# Measured by benchmarks.gpu, in results/benchmarks/gpu_nvidia-h200.json.
CLUSTERS["h200-sxm"] |= {"achieved_memory_bandwidth": 0.875, "launch_us": 37}
# Fitted by benchmarks.published to its fitted sources, as SLOWED and IMBALANCE in estimate.py.
CLUSTERS["a100-sxm"] |= {"achieved_flops": 0.84, "narrow_heads": 0.87}
CLUSTERS["h100-sxm"] |= {"achieved_flops": 0.72}
SPREAD: dict[Preset, tuple[float, float, int]] = {
    "a100-sxm": (0.77, 1.05, 9), "h100-sxm": (0.80, 1.20, 19), "h200-sxm": (1.00, 1.12, 3), "b200-sxm": (1.36, 1.36, 1),
}  # fmt: skip
"""Planned over published tokens/s, least and most, and rows, of sources that nothing was fitted to, by the same."""


class ClusterConfig(Section):
    """The cluster that the run is planned for."""

    preset: Preset = "h100-sxm"
    """Published values of device, memory, links and host; other keys override them."""
    nodes: int = Field(default=1, gt=0)
    """Number of nodes."""
    gpus_per_node: int = Field(default=8, gt=0)
    """GPUs, and ranks, per node; without it launch.ranks or launch.cpu_ranks of the recipe, or else 8."""
    device: str
    """Name of the GPU as torch.cuda.get_device_name() returns it; it determines the peak FLOP/s."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of dense matrix products in train.dtype, in TFLOP/s; without it the published value of the device."""
    memory_gb: float = Field(gt=0)
    """Memory of a GPU in GB (10⁹ bytes, as everywhere here)."""
    reserved_gb: float = Field(default=4.0, ge=0)
    """GPU memory in GB that CUDA, NCCL, libraries and fragmentation take."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth of a GPU in GB/s."""
    link_gb_s: float = Field(gt=0)
    """Bandwidth of a GPU to the other GPUs of its node, one direction, in GB/s."""
    network_gb_s: float = Field(gt=0)
    """Bandwidth of a node to other nodes, all adapters together, one direction, in GB/s."""
    host_link_gb_s: float = Field(gt=0)
    """Bandwidth of a GPU to its host, one direction, in GB/s."""
    host_memory_gb_s: float = Field(gt=0)
    """Memory bandwidth of a node's host in GB/s."""
    host_memory_gb: float = Field(gt=0)
    """Host memory of a node in GB."""
    gpu_hour_price: float | None = Field(default=None, gt=0)
    """Price of a GPU for an hour, in any currency. With it the plan has the price of the run."""
    disk_gb_s: float = Field(default=2.0, gt=0)
    """Write rate of one rank to the shared file system in GB/s."""
    achieved_flops: float = Field(default=0.7, gt=0, le=1)
    """Fraction of the peak FLOP/s that matrix products reach: as on an H200."""
    achieved_attention_flops: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the peak FLOP/s that flash attention reaches with long rows in heads of 128 channels; without it 0.35 with train.attention fa2, as on an H200, and 0.55 with fa3, an estimate."""
    narrow_heads: float = Field(default=0.7, gt=0, le=1)
    """Fraction of that which it reaches in heads of 64 channels: as on an H200."""
    achieved_memory_bandwidth: float = Field(default=0.85, gt=0, le=1)
    """Fraction of the memory bandwidth that operations reach: measured on an H200, otherwise assumed."""
    achieved_bandwidth: float = Field(default=0.7, gt=0, le=1)
    """Assumed fraction of their bandwidth that links and network reach."""
    launch_us: float = Field(default=15.0, ge=0)
    """Time in µs in which the host launches one operation, measured on an H200, otherwise assumed; it limits small operations."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("preset", "h100-sxm") if isinstance(values, dict) else None
        if not isinstance(preset, str) or preset not in CLUSTERS:
            return values
        return {**CLUSTERS[preset], **values}

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


class PlanConfig(PretrainConfig):
    """Settings of `tost plan`: those of `tost train`, and the cluster."""

    cluster: ClusterConfig = Field(default_factory=lambda: ClusterConfig.model_validate({}))

    @model_validator(mode="before")
    @classmethod
    def _as_many_gpus_as_ranks(cls, values: Any) -> Any:
        launch, cluster = (values.get(name, {}) for name in ("launch", "cluster"))
        if not isinstance(launch, dict) or not isinstance(cluster, dict):
            return values
        ranks = launch.get("ranks") or launch.get("cpu_ranks")
        return {**values, "cluster": {"gpus_per_node": ranks, **cluster}} if isinstance(ranks, int) else values

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step. Raises ConfigError when the batch is not divisible by the ranks."""
        return self.accumulation(self.cluster.ranks)
