"""Memory and values of the weights that a rank holds, without the rest of the model."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tost_lm.model.config import ModelConfig
from tost_lm.model.initialization import Normal, draw, draw_seed, initial_values
from tost_lm.model.lm import TostLM
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.tensor_slice import slice_of


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype, *, shared: bool = False) -> None:
    """Replace all parameters, which are on the meta device, by new ones without values.

    Args:
        shared: all have the same memory, that of the largest: for a DeepSpeed engine that copies weights into its own.
    """
    parameters = dict(model.named_parameters())
    largest = max(parameter.numel() for parameter in parameters.values())
    memory = torch.empty(largest if shared else 0, dtype=dtype, device=device)
    for name, parameter in parameters.items():
        if shared:
            data = memory[: parameter.numel()].view(parameter.shape)
        else:
            data = torch.empty(parameter.shape, dtype=dtype, device=device)
        allocated = nn.Parameter(data)
        marks = {key: mark for key, mark in vars(parameter).items() if not hasattr(allocated, key)}
        vars(allocated).update(marks)  # of tensor ranks
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, allocated)


def draw_on_rank(model: nn.Module, config: ModelConfig, axis: Axis) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of each parameter's slice on this tensor rank, float32 on the CPU, as `TostLM(config)` draws it.

    The seed comes from torch's CPU generator, which all ranks seed alike.
    """
    seed = draw_seed()
    with torch.device("meta"):
        whole = TostLM(config)
    values = initial_values(whole, config.layers)
    for name, parameter in model.named_parameters():
        value, shape, held = values[name], whole.get_parameter(name).shape, slice_of(parameter)
        if isinstance(value, Normal) and held is not None:
            yield name, draw(value, seed, name, shape, held.dim, held.ranges(shape[held.dim], axis))
        elif isinstance(value, Normal):
            yield name, draw(value, seed, name, shape)
        else:
            yield name, local_slice(torch.as_tensor(value, dtype=torch.float32).expand(shape), parameter, axis)


def local_slice(whole: Tensor, parameter: nn.Parameter, axis: Axis) -> Tensor:
    """This tensor rank's slice of a whole tensor of a parameter."""
    held = slice_of(parameter)
    return whole if held is None else held.local(whole, axis)
