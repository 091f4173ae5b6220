"""Runs `tost train`."""

from tost_lm.cli.train import run

if __name__ == "__main__":
    run()
