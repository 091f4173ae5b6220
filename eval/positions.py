"""Runs `tost eval positions`."""

from tost_lm.cli.eval.positions import run

if __name__ == "__main__":
    run()
