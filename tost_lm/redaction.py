"""Credentials in URLs: settings with them are refused, and messages show none."""

import re

MARK = "[redacted]"
SECRET_WORDS = {
    "key", "keys", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd", "pgpassword", "pwd",
    "auth", "authorization", "credential", "credentials", "signature", "sig",
}  # fmt: skip
"""A name in a query that has one of these words is a secret."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# pathlib turns // into /. A password may have slashes, but what follows a port is a path.
_USER_IN_URL = re.compile(r"(:/{1,2})(?:[^/\s:@]*(?::|%3A)(?!\d{1,5}/)\S{1,1000}|[^/\s]+)(?:@|%40)", re.IGNORECASE)
_QUERY = re.compile(r"""([?&#]([\w.-]+)=)([^\s&#"']+)""")


def is_secret(name: str) -> bool:
    """Whether a name in the query of a URL is that of a secret: X-Amz-Signature, token, apiKey."""
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
