"""Settings of a plan: those of a run, and the machines it is planned for."""

from typing import Any, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.training.config import PretrainConfig

Preset = Literal["a100-sxm", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm"]

_FIGURES = ("device", "memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "host_memory_gb")
# NVIDIA's data sheets of the GPUs and of DGX A100, H100, H200 and B200; of PCIe nodes, one adapter of 400 Gbit/s.
CLUSTERS: dict[Preset, dict[str, Any]] = {
    "a100-sxm": dict(zip(_FIGURES, ("NVIDIA A100-SXM4-80GB", 80, 2039, 300, 200, 2000), strict=True)),
    "h100-sxm": dict(zip(_FIGURES, ("NVIDIA H100 80GB HBM3", 80, 3350, 450, 400, 2000), strict=True)),
    "h100-pcie": dict(zip(_FIGURES, ("NVIDIA H100 PCIe", 80, 2000, 64, 50, 1000), strict=True)),
    "h200-sxm": dict(zip(_FIGURES, ("NVIDIA H200", 141, 4800, 450, 400, 2000), strict=True)),
    "b200-sxm": dict(zip(_FIGURES, ("NVIDIA B200", 180, 7700, 900, 400, 2000), strict=True)),
}


class ClusterConfig(Section):
    """The machines that a run is planned for."""

    preset: Preset = "h100-sxm"
    """Fills device and the figures of its memory, links and host with published values; a key given beside it wins."""
    nodes: int = Field(default=1, gt=0)
    """How many machines."""
    gpus_per_node: int = Field(default=8, gt=0)
    """Ranks of each."""
    device: str
    """The GPU as torch.cuda.get_device_name() gives it: its peak follows from that."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Of dense products in train.dtype; without it as published for the device."""
    memory_gb: float = Field(gt=0)
    """Memory of a GPU, in 10⁹ bytes, as all GB here."""
    reserved_gb: float = Field(default=4.0, ge=0)
    """Of that, what CUDA, NCCL and libraries take, and the allocator cannot use."""
    memory_gb_s: float = Field(gt=0)
    """Bandwidth of a GPU's memory."""
    link_gb_s: float = Field(gt=0)
    """Bandwidth of a GPU to the others of its node, one way."""
    network_gb_s: float = Field(gt=0)
    """Bandwidth of a node to the others, all its adapters together, one way."""
    host_memory_gb: float = Field(gt=0)
    """Memory of a node outside its GPUs."""
    disk_gb_s: float = Field(default=2.0, gt=0)
    """What one rank writes to the shared file system."""
    achieved_flops: float = Field(default=0.4, gt=0, le=1)
    """Share of the peak that products are taken to reach."""
    achieved_bandwidth: float = Field(default=0.7, gt=0, le=1)
    """Share of their bandwidth that memory, links and network are taken to reach."""
    latency_us: float = Field(default=20.0, ge=0)
    """Of a collective, however small."""
    launch_us: float = Field(default=6.0, ge=0)
    """What the host takes to start an operation; it decides where a GPU has little to do in each."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("preset", "h100-sxm") if isinstance(values, dict) else None
        return {**CLUSTERS[preset], **values} if isinstance(preset, str) and preset in CLUSTERS else values

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


class PlanConfig(PretrainConfig):
    """What `pretrain.plan` reads: a file of `configs/pretrain/`, and the cluster beside it."""

    cluster: ClusterConfig = Field(default_factory=lambda: ClusterConfig.model_validate({}))

    @property
    def micro_batches(self) -> int:
        """Of a rank and step. Raises ConfigError when ranks or batch cannot be shared out evenly."""
        return self.accumulation(self.cluster.ranks)
