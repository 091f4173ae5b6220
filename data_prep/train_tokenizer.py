"""Runs `tost prepare tokenizer`."""

from tost_lm.cli.prepare.tokenizer import run

if __name__ == "__main__":
    run()
