"""Runs `tost eval text`."""

from tost_lm.cli.eval.text import run

if __name__ == "__main__":
    run()
