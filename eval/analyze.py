"""Runs `tost eval analyze`."""

from tost_lm.cli.eval.analyze import run

if __name__ == "__main__":
    run()
