"""Runs `tost report`."""

from tost_lm.cli.report import run

if __name__ == "__main__":
    run()
