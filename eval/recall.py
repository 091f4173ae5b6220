"""Runs `tost eval recall`."""

from tost_lm.cli.eval.recall import run

if __name__ == "__main__":
    run()
