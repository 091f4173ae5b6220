"""Token mixers of users: a file that the user names is run, and registers a mixer. No other file ever is.

The user names files in `model.plugins` of a recipe, or in the environment variable TOST_PLUGINS for programs that read
a model. Checkpoints store the text of a plugin, which is only read, and its SHA-256, which must be that of the file.
"""

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tost_lm.config import Section, validate
from tost_lm.errors import ConfigError
from tost_lm.files import regular_file, sha256_bytes
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.spec import MixerSpec, Plugin
from tost_lm.user_files import run_user_file

VARIABLE = "TOST_PLUGINS"
"""Files, separated as in PATH."""
SHA256 = "sha256"
"""The key in `model.plugin_settings.LETTER` that identifies the plugin's text."""


def register(spec: MixerSpec, layer: type) -> None:
    """Make a mixer known to this process. The file of the layer's class calls it, on every import.

    Args:
        spec: `letter` is a capital letter that no other mixer has.
        layer: a `tost_lm.mixers.layer.TokenMixer`.

    Raises:
        ConfigError: the letter is taken or no capital letter, an attribute of the spec is missing, the layer is no
            `TokenMixer`, or its module is not a file.
    """
    file = Path(getattr(sys.modules[layer.__module__], "__file__", None) or "")
    if not file.is_file():
        raise ConfigError(
            f"plugin: {layer.__name__} is not defined in a file; write it to a file, which is stored with models"
        )
    what, text = f"plugin {file}", regular_file(file).read_bytes()
    for name in ("letter", "name", "tag", "settings"):
        if not hasattr(spec, name):
            raise ConfigError(f"{what}: its spec has no {name}; set it")
    if not re.fullmatch("[A-Z]", spec.letter):
        raise ConfigError(f"{what}: its letter is {spec.letter!r}; choose a capital letter")
    if not issubclass(layer, import_module("tost_lm.mixers.layer").TokenMixer):  # imports torch
        raise ConfigError(f"{what}: {layer.__name__} is no TokenMixer; derive it from tost_lm.mixers.layer.TokenMixer")
    known, plugin = SPECS.get(spec.letter), Plugin(layer, text, sha256_bytes(text))
    if known and (known.plugin is None or known.plugin.sha256 != plugin.sha256):
        raise ConfigError(f"{what}: the letter {spec.letter} is taken by {known.name}; choose another letter")
    if known is None:
        spec.plugin = plugin
        SPECS[spec.letter] = spec


def run_plugin(path: Path) -> None:
    """Run a file that the user has named, once for the same text. Raises ConfigError if it registers no mixer."""
    missing = "registers no mixer; call tost_lm.mixers.plugins.register in it"
    run_user_file(path, f"plugin {path}", _is_registered, missing)


def unknown_letters(pattern: str) -> set[str]:
    """The letters of a pattern that are no mixer's, also not of a plugin in TOST_PLUGINS. Raises as `run_plugin`."""
    if set(pattern) - set(SPECS):
        for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
            run_plugin(Path(path))
    return set(pattern) - set(SPECS)


def file_name(letter: str) -> str:
    """The file with the text of a plugin in a model folder."""
    return f"mixer_{letter}.py"


def plugin_files(pattern: str) -> dict[str, bytes]:
    """The texts of the plugins in a pattern, by the names of their files in a model folder."""
    return {file_name(letter): plugin.text for letter, plugin in _plugins(pattern).items()}


def complete_settings(pattern: str, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`model.plugin_settings` with all values of each plugin in the pattern, and the SHA-256 of its text.

    Raises:
        ConfigError: settings are not those of a plugin, or the plugin has another text than `given` says.
    """
    plugins = _plugins(pattern) | _plugins("".join(given))
    if others := given.keys() - plugins.keys():
        raise ConfigError(
            f"model.plugin_settings.{min(others)}: no plugin has this letter; name its file in model.plugins"
        )
    completed = {}
    for letter, plugin in plugins.items():
        own, where = dict(given.get(letter, {})), f"model.{SPECS[letter].section}"
        if (stored := own.pop(SHA256, plugin.sha256)) != plugin.sha256:
            raise ConfigError(
                f"{where}.{SHA256}: the model needs the plugin with SHA-256 {stored}, and the one that is named has "
                f"{plugin.sha256}; name the text that is stored with the model, {file_name(letter)}"
            )
        try:
            values = validate(SPECS[letter].settings, own, where).model_dump(mode="json")
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{where}: ", f"{where}.")) from None
        completed[letter] = {SHA256: plugin.sha256, **values}
    return completed


def settings_of(letter: str, stored: Mapping[str, Any]) -> Section:
    """The settings of a plugin, from those that `complete_settings` returns."""
    own = {name: value for name, value in stored.items() if name != SHA256}
    return validate(SPECS[letter].settings, own, f"model.plugin_settings.{letter}")


def _plugins(letters: str) -> dict[str, Plugin]:
    used = ((letter, SPECS[letter].plugin) for letter in SPECS if letter in letters)
    return {letter: plugin for letter, plugin in used if plugin}


def _is_registered(sha256: str) -> bool:
    return any(spec.plugin and spec.plugin.sha256 == sha256 for spec in SPECS.values())
