"""Count what the plan takes from a token mixer of one's own: operations and stored bytes, beside those in its spec.

    tost plugin demo 'model.plugins=["gated_ema.py"]' model.pattern=E

It takes the arguments of `tost train`. A layer of each plugin in model.pattern mixes two documents, one row of the
recipe, on the CPU in train.dtype, forward and backward. Kernels that torch's dispatcher does not see are not counted.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.errors import ConfigError
from tost_lm.markdown import table
from tost_lm.mixers.spec import BLOCK_LAUNCHES, Load, MixerSpec
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES
from tost_lm.pretrain.settings import PretrainConfig


def main(path: Path, config: PretrainConfig) -> None:
    plugins = [spec for spec, _ in config.model.mixers if spec.plugin]
    if not plugins:
        raise ConfigError(f"model.pattern: no plugin is in {config.model.pattern}; name one in model.plugins")
    rows = []
    for spec in plugins:
        T, counted = config.row_tokens, count(spec, config)
        load = Load(config.model.shape_of(spec.letter), ELEMENT_BYTES[config.train.dtype], True, T, T, T, 1, 1, 1)
        stated = spec.launches(), spec.stored_bytes(load)
        rows += [
            [spec.name, name, f"{a:,.0f}", f"{b:,.0f}"]
            for name, a, b in zip(("launches", "stored bytes"), counted, stated, strict=True)
        ]
    print(table(("plugin", f"of {config.row_tokens:,} tokens", "counted", "its spec"), rows))


def count(spec: MixerSpec, config: PretrainConfig) -> tuple[int, float]:
    """The launches and the stored bytes per token, as in `MixerSpec`, of a layer with drawn weights on a row of the
    recipe, which is two documents."""
    import torch  # takes seconds
    from torch.autograd.graph import saved_tensors_hooks

    from tost_lm.mixers.registry import mixer_class
    from tost_lm.ops.positions import SequenceInfo
    from tost_lm.testing.operations import Operations

    T, C, dtype = config.row_tokens, config.model.width, getattr(torch, config.train.dtype)
    layer = mixer_class(spec.letter)(config.model.shape_of(spec.letter)).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, C**-0.5)
    offsets = torch.tensor([0, T // 2, T]) if T > 1 else None
    info = SequenceInfo.of(torch.zeros(1, T), None, offsets, output_state=False)
    x_BTC = torch.randn(1, T, C, dtype=dtype, requires_grad=True)
    others = {x.untyped_storage().data_ptr() for x in (x_BTC, *layer.parameters())}
    stored: dict[int, torch.UntypedStorage] = {}  # by address; holds them, so that no address is used twice

    def store(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in others:
            stored[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    layer(x_BTC, None, info)  # fills caches of offsets
    with Operations() as operations, saved_tensors_hooks(store, lambda x: x):
        y_BTC, _ = layer(x_BTC, None, info)
    with operations:
        y_BTC.backward(torch.ones_like(y_BTC))
    bytes_per_token = sum(storage.nbytes() for storage in stored.values()) / T
    return operations.counts.total() + BLOCK_LAUNCHES, bytes_per_token


def run() -> NoReturn:
    run_program(main, name="tost plugin", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
