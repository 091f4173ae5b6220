"""Print what the plan counts of a layer with a token mixer of one's own.

    tost plugin demo 'model.plugins=["gated_ema.py"]' model.pattern=E

It takes the arguments of `tost train`. A layer of each plugin in model.pattern mixes a row of the recipe or a tile, on
the CPU in train.dtype, forward and backward, on tensors without values. Kernels that torch's dispatcher does not see
are not counted.
"""

from math import prod
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.errors import ConfigError
from tost_lm.markdown import table
from tost_lm.pretrain.plan.activations import costs_of
from tost_lm.pretrain.settings import PretrainConfig


def main(path: Path, config: PretrainConfig) -> None:
    plugins = [(spec, shape) for spec, shape in config.model.mixers if spec.plugin]
    if not plugins:
        raise ConfigError(f"model.pattern: no plugin is in {config.model.pattern}; name one in model.plugins")
    rows = []
    for spec, shape in plugins:
        costs, numbers, flops = costs_of(config, spec), spec.numbers(shape), spec.flops(shape, config.row_tokens)
        counts = {
            "launches": costs.launches,
            "stored bytes per token": costs.stored,
            "bytes of a state": costs.state,
            "parameters": spec.weights(shape) + sum(map(prod, (*numbers.split, *numbers.replicated))),
            "FLOP per token between the projections": sum(kind.total for kind in flops),
        }
        rows += [(spec.name, name, f"{count:,.0f}") for name, count in counts.items()]
    print(table(("plugin", f"of {config.tile_tokens:,} tokens", "counted"), rows))


def run() -> NoReturn:
    run_program(main, name="tost plugin", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
