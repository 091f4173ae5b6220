"""Runs `tost eval verify`."""

from tost_lm.cli.eval.verify import run

if __name__ == "__main__":
    run()
