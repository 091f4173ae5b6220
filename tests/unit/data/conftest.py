"""Shards for reading; a test that damages them uses a copy."""

import json

import pytest
from builds import TEXTS, Built, prep_config

from tost_lm.data.build import build_shards
from tost_lm.data.tokenizers.interface import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    tokenizer = SentencePieceTokenizer(train_sentencepiece(TEXTS * 20, 300))
    config = prep_config(folder / "corpus.jsonl", folder / "shards")
    return Built(config, tokenizer, build_shards(config, tokenizer))
