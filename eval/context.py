"""Runs `tost eval context`."""

from tost_lm.cli.eval.context import run

if __name__ == "__main__":
    run()
