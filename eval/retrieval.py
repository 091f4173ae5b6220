"""Runs `tost eval retrieval`."""

from tost_lm.cli.eval.retrieval import run

if __name__ == "__main__":
    run()
