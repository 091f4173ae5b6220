"""Typed settings: TOML and overrides in, a frozen validated tree out. Nothing here imports torch."""

from tost_lm.config.program import run_program
from tost_lm.config.section import Section, differences, load_config, read_toml, to_toml, validate

__all__ = ["Section", "differences", "load_config", "read_toml", "run_program", "to_toml", "validate"]
