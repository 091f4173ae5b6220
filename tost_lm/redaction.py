"""Secrets in settings, command lines and texts are redacted before these are shown."""

import re
from collections.abc import Sequence
from typing import Any

MARK = "[redacted]"
SECRET_WORDS = {
    "key", "keys", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd", "pgpassword", "pwd",
    "auth", "authorization", "credential", "credentials", "signature", "sig",
}  # fmt: skip
"""A name that has one of these words is a secret. `tokens` is missing because settings count tokens."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# pathlib turns // into /. A password may have slashes, but what follows a port is a path.
_USER_IN_URL = re.compile(r"(:/{1,2})(?:[^/\s:@]*(?::|%3A)(?!\d{1,5}/)\S{1,1000}|[^/\s]+)(?:@|%40)", re.IGNORECASE)
_QUERY = re.compile(r"""([?&#]([\w.-]+)=)([^\s&#"']+)""")
_PAIR = re.compile(r"""([\w.-]+["']?\s*[=:]\s*)("(?:\\.|[^"\\])*"|'[^']*'|[^\s,;&}\]]+)""")
_BEARER = re.compile(r"\b(bearer )[^\s\"',;]+", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_ASSIGNMENT = re.compile(r"([\w.-]+=)(.*)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether the name of a setting, variable or flag is that of a secret: hub.token, WANDB_API_KEY, apiKey."""
    return any(word.lower() in SECRET_WORDS for word in _WORD.findall(name))


def has_credentials(url: str) -> bool:
    """Whether a URL of a storage, without its scheme, has a user, a password or a token. Names of buckets have no `:`,
    `@` or `%`, but those of Amazon's access points begin with `arn:`."""
    bucket = url.partition("/")[0]
    signs = "@%" if bucket.startswith("arn:") else ":@%"
    return any(sign in bucket for sign in signs) or any(is_secret(name) for _, name, _ in _QUERY.findall(url))


def redact_urls(text: str) -> str:
    """The text without user, password and secrets of the query in its URLs."""
    text = _QUERY.sub(lambda pair: pair[1] + (MARK if is_secret(pair[2]) else pair[3]), text)
    return _USER_IN_URL.sub(rf"\1{MARK}@", text)


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command line without the values of secrets in `name=value` and `--name value`."""
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
    """Settings in tables and lists without the values, even tables, whose name is that of a secret."""
    if isinstance(tree, dict):
        return {
            redact_text(name): MARK if is_secret(name) and value is not None else redact_tree(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redact_tree(item) for item in tree]
    return redact_text(tree) if isinstance(tree, str) else tree


def redact_text(text: str) -> str:
    """The text without user and password in URLs, secrets in pairs like `token=abc` and `"token": "abc"`, signatures of
    addresses, `Bearer abc` and tokens of the Hugging Face hub."""
    text = _HUB_TOKEN.sub(MARK, _BEARER.sub(rf"\1{MARK}", text))
    return _PAIR.sub(_redact_pair, _USER_IN_URL.sub(rf"\1{MARK}@", text))


def _redact_pair(pair: re.Match[str]) -> str:
    name, value = pair.groups()
    return name + (MARK if is_secret(name) else redact_text(value))
