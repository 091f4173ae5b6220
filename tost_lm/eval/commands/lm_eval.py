"""Run lm-evaluation-harness on a checkpoint, as its model `tost_lm`. All arguments are the harness's.

    tost lm-eval run --model tost_lm --model_args pretrained=runs/demo --tasks lambada_openai wikitext
    tost lm-eval run --model tost_lm --model_args pretrained=runs/base --tasks arc_easy \\
      --batch_size auto --output_path out
    torchrun --standalone --nproc-per-node 4 -m tost_lm.eval.commands.lm_eval run --model tost_lm \\
      --model_args pretrained=runs/base …

pretrained is a run folder, a step folder or an export. --batch_size counts texts that are read at once (auto: as many
as fit the memory). max_length=N in --model_args sets the tokens of a window, by default the length that the model was
trained at. Under a launcher each GPU has a copy of the model and computes a subset of the requests. `run --help` lists
the harness's arguments, `ls tasks` its tasks.
"""

import sys
from importlib.util import find_spec
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import ConfigError, install_hint


def main(path: None, config: Section) -> None:
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return
    if not find_spec("lm_eval"):
        raise ConfigError(f"lm-evaluation-harness is not installed; {install_hint('lm-eval')}")
    from lm_eval.__main__ import cli_evaluate

    import tost_lm.eval.lm_eval  # registers the model  # noqa: F401

    cli_evaluate()


def run() -> NoReturn:
    run_program(main, name="tost lm-eval", doc=__doc__ or "", positional="[ARGUMENT…]", config=Section, arguments=[])


if __name__ == "__main__":
    run()
