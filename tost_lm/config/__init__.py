"""Typed settings: from TOML and overrides to a frozen, validated tree. This package does not import torch."""

from tost_lm.config.program import run_program
from tost_lm.config.section import Section, differences, load_config, read_toml, to_toml, validate

__all__ = ["Section", "differences", "load_config", "read_toml", "run_program", "to_toml", "validate"]
