"""Runs `tost prepare inspect`."""

from tost_lm.cli.prepare.inspect import run

if __name__ == "__main__":
    run()
