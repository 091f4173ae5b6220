"""Runs `tost eval zero-shot`."""

from tost_lm.cli.eval.zero_shot import run

if __name__ == "__main__":
    run()
