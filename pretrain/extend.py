"""Runs `tost extend`."""

from tost_lm.cli.extend import run

if __name__ == "__main__":
    run()
