"""Count what the plan takes from a token mixer of one's own: operations and stored bytes, beside those in its spec.

    tost plugin demo 'model.plugins=["gated_ema.py"]' model.pattern=E

It takes the arguments of `tost train`. A layer of each plugin in model.pattern mixes two documents, one row of the
recipe, on the CPU in train.dtype, forward and backward. Kernels that torch's dispatcher does not see are not counted.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.markdown import table
from tost_lm.mixers.spec import Load
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES
from tost_lm.pretrain.settings import PretrainConfig


def main(path: Path, config: PretrainConfig) -> None:
    from tost_lm.pretrain.plan.counted import count  # imports torch, which takes seconds

    plugins = [spec for spec, _ in config.model.mixers if spec.plugin]
    if not plugins:
        raise ConfigError(f"model.pattern: no plugin is in {config.model.pattern}; name one in model.plugins")
    rows = []
    for spec in plugins:
        T, counted = config.row_tokens, count(spec, config)
        load = Load(config.model.shape_of(spec.letter), ELEMENT_BYTES[config.train.dtype], True, T, T, T, 1, 1, 1)
        stated = spec.launches(), spec.stored_bytes(load)
        rows += [
            [spec.name, name.replace("_", " "), f"{a:,.0f}", f"{b:,.0f}"]
            for name, a, b in zip(counted._fields, counted, stated, strict=True)
        ]
    print(table(("plugin", f"of {config.row_tokens:,} tokens", "counted", "its spec"), rows))


def run() -> NoReturn:
    run_program(main, name="tost plugin", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
