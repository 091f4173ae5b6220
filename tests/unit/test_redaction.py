"""Which names in a URL are a secret's, and what a message shows of URLs."""

import pytest

from tost_lm.redaction import MARK, is_secret, redact_urls


@pytest.mark.parametrize("name", ["X-Amz-Signature", "apiKey", "APIKey", "access_token", "sig", "pwd"])
def test_a_word_of_its_own_makes_a_secret(name: str):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["tokens", "monkey", "keyboard", "authors", "sigma", "part"])
def test_a_part_of_a_word_does_not(name: str):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/x?X-Amz-Signature=abc&part=1", f"https://host/x?X-Amz-Signature={MARK}&part=1"),
        ("https:/host/x?sv=1&sig=a%2Fc", f"https:/host/x?sv=1&sig={MARK}"),
        ("s3://me:ab/c+d/e=@bucket/x: denied", f"s3://{MARK}@bucket/x: denied"),
        ("in s3:/me:a@b/c@bucket", f"in s3:/{MARK}@bucket"),
        ("s3://me%3Aab%2Fc%40bucket/x, s3://:a/b@bucket", f"s3://{MARK}@bucket/x, s3://{MARK}@bucket"),
        ("https://me:a/b?c#d@host/x", f"https://{MARK}@host/x"),
        ("a: b, c=d; https://host:80/a@b /data/tokens=3", "a: b, c=d; https://host:80/a@b /data/tokens=3"),
    ],
)
def test_a_message_shows_no_credentials_of_a_url(text: str, shown: str):
    assert redact_urls(text) == shown
