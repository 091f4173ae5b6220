"""Errors that are the user's to mend: a program prints them as one line each and exits with 2, without a traceback."""


class TostError(Exception):
    """Base of all errors shown to a user as plain lines. The message names the thing and the fix."""

    printed_here: bool | None = None
    """Whether this rank is one that prints it, where all ranks raise it and know so; None: each may be the only one."""


class ConfigError(TostError, ValueError):
    """A configuration file, an override or a combination of settings cannot be used."""


class DataError(TostError):
    """A corpus, tokenizer or shard folder is missing, damaged or does not belong to the rest."""


class CheckpointError(TostError):
    """A checkpoint is missing, incomplete, damaged or belongs to something else."""


class TrainingError(TostError):
    """A run cannot go on as it is: out of memory, or its steps are all skipped."""


class CorruptionError(TostError):
    """A rank's memory changed by itself."""
