"""Which names are a secret's, and what a recorded command line or a tree of settings shows of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tost_lm.config import Section
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.redaction import MARK, is_secret, redact_command, redact_text, redact_tree


@pytest.mark.parametrize(
    "name",
    [
        "hub.token", "WANDB_API_KEY", "apiKey", "APIKey", "--password", "aws-secret-access-key", "db.secrets", "--auth",
        "PGPASSWORD", "pwd", "X-Amz-Signature", "X-Amz-Credential", "sig", "Signature", "Authorization",
    ],
)  # fmt: skip
def test_a_word_of_its_own_makes_a_secret(name: str):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["train.seq_len", "tokenizer.path", "monkey", "keyboard", "authors", "sigma", "--"])
def test_a_part_of_a_word_does_not(name: str):
    assert not is_secret(name)


def test_no_setting_of_a_run_is_named_as_a_secret():
    names = list(setting_names(PretrainConfig, ""))
    assert "train.seq_len" in names
    assert [name for name in names if is_secret(name)] == []


def test_a_command_line_keeps_everything_but_secrets():
    command = [
        "configs/x.toml", "train.seq_len=64", "hub.token=a b=c", "--password", "-x y", "--token=abc",
        "--dry-run", "data.folder=https://me:pa@ss@host/shards?token=abc&part=1",
        'hub={name = "n", "api_key" : "x\\"y", token=z}',
        "WANDB_API_KEY=0123", "--auth", "me:abc",
    ]  # fmt: skip
    assert redact_command(command) == [
        "configs/x.toml", "train.seq_len=64", f"hub.token={MARK}", "--password", MARK, f"--token={MARK}",
        "--dry-run", f"data.folder=https://{MARK}@host/shards?token={MARK}&part=1",
        f'hub={{name = "n", "api_key" : {MARK}, token={MARK}}}', f"WANDB_API_KEY={MARK}", "--auth", MARK,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/x?X-Amz-Signature=abc&part=1", f"https://host/x?X-Amz-Signature={MARK}&part=1"),
        ("https:/host/x?sv=1&sig=a%2Fc", f"https:/host/x?sv=1&sig={MARK}"),
        ("curl -H 'Authorization: Bearer abc' y", f"curl -H 'Authorization: {MARK} {MARK}' y"),
        ("https://me:abc@host, bearer abc", f"https://{MARK}@host, bearer {MARK}"),
        (f"data/hf_{'aB3' * 11}/shards", f"data/{MARK}/shards"),
        ("s3://me:ab/c+d/e=@bucket/x: denied", f"s3://{MARK}@bucket/x: denied"),
        ("in s3:/me:a@b/c@bucket", f"in s3:/{MARK}@bucket"),
        ("s3://me%3Aab%2Fc%40bucket/x, s3://:a/b@bucket", f"s3://{MARK}@bucket/x, s3://{MARK}@bucket"),
        ("https://me:a/b?c#d@host/x", f"https://{MARK}@host/x"),
    ],
)
def test_a_secret_in_a_text_is_found_by_its_form(text: str, shown: str):
    assert redact_text(text) == shown


def test_a_tree_keeps_its_shape_and_its_other_values():
    tree = {
        "train": {"seq_len": 64, "lr": 1e-3},
        "hub": {"token": "abc", "user": "me", "old_token": None},
        "secrets": {"a": "abc"},
        "mirrors": ["https://me:abc@host/x", "https://host/y"],
        "tokenizer": {"path": "data/tokenizer.model"},
    }
    assert redact_tree(tree) == {
        "train": {"seq_len": 64, "lr": 1e-3},
        "hub": {"token": MARK, "user": "me", "old_token": None},
        "secrets": MARK,
        "mirrors": [f"https://{MARK}@host/x", "https://host/y"],
        "tokenizer": {"path": "data/tokenizer.model"},
    }


def test_a_text_without_secrets_stays_to_the_letter():
    text = "a: b, c=d; {x: 'y'} https://host:80/a@b /data/tokens=3 tokenizer='k e y' hf_folder the bearer"
    assert redact_text(text) == text


def setting_names(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from setting_names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
