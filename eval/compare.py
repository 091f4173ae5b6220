"""Runs `tost eval compare`."""

from tost_lm.cli.eval.compare import run

if __name__ == "__main__":
    run()
