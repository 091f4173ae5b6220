"""Settings and command lines as they may be recorded: without keys, tokens, secrets and passwords."""

import re
from collections.abc import Sequence
from typing import Any

MARK = "[redacted]"
SECRET_WORDS = {"key", "keys", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd"}
"""Of these a name consists in part. No plural of token: our settings count them."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER_IN_URL = re.compile(r"(:/{1,2})[^/\s]+@")  # a path has lost one of the two strokes
_PAIR = re.compile(r"""([\w.-]+["']?\s*[=:]\s*)("(?:\\.|[^"\\])*"|'[^']*'|[^\s,;&}\]]+)""")
_ASSIGNMENT = re.compile(r"([\w.-]+=)(.*)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether a setting, variable or flag is named as one that holds a secret: hub.token, WANDB_API_KEY, apiKey."""
    return any(word.lower() in SECRET_WORDS for word in _WORD.findall(name))


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command line; `name=value` and `--name value` lose their value where the name is a secret's."""
    shown: list[str] = []
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        if before.startswith("-") and "=" not in before and is_secret(before):
            shown.append(MARK)
        elif (assignment := _ASSIGNMENT.fullmatch(word)) and is_secret(assignment[1]):
            shown.append(assignment[1] + MARK)
        else:
            shown.append(redact_text(word))
    return shown


def redact_tree(tree: Any) -> Any:
    """Settings in tables and lists; what is named as a secret is replaced whole, also a table."""
    if isinstance(tree, dict):
        return {
            redact_text(name): MARK if is_secret(name) and value is not None else redact_tree(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redact_tree(item) for item in tree]
    return redact_text(tree) if isinstance(tree, str) else tree


def redact_text(text: str) -> str:
    """Without the user and password of URLs, and the values in pairs like `token=abc` and `"token": "abc"`."""
    return _PAIR.sub(_redact_pair, _USER_IN_URL.sub(rf"\1{MARK}@", text))


def _redact_pair(pair: re.Match[str]) -> str:
    name, value = pair.groups()
    return name + (MARK if is_secret(name) else redact_text(value))
