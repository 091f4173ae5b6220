"""The zero-shot protocols by name."""

import re

from tost_lm.errors import ConfigError
from tost_lm.evaluation.protocols.authors import RandomWindows, joined
from tost_lm.evaluation.protocols.cbt import MissingWord
from tost_lm.evaluation.protocols.characters import LastBytes
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, is_gpt2s
from tost_lm.evaluation.protocols.lambada import LastToken, LastWord, passages
from tost_lm.evaluation.protocols.openwebtext import OpenWebText, read_ids
from tost_lm.evaluation.protocols.ptb import PennTreebank, sentences
from tost_lm.evaluation.protocols.wikitext import StridedWikitext, WikitextPages, rows_of

__all__ = ["Example", "Protocol", "Row", "find_protocol", "is_gpt2s"]

_NAMED: list[Protocol] = [
    WikitextPages("wikitext2"),
    WikitextPages("wikitext103"),
    LastWord("lambada_openai"),
    LastToken("lambada_openai"),
    LastWord("lambada_standard"),
    MissingWord("cbt_cn"),
    MissingWord("cbt_ne"),
    PennTreebank(),
    LastBytes("enwik8@bpb"),
    LastBytes("text8@bpc"),
    OpenWebText(),
    RandomWindows("owt", read_ids),
    RandomWindows("wikitext103", joined(rows_of)),
    RandomWindows("lambada_standard", joined(passages)),
    RandomWindows("ptb", joined(sentences)),
]


def find_protocol(name: str, setting: str = "zero_shot.protocols") -> Protocol:
    """Raises ConfigError, naming `setting` and all there are, when there is none of this name."""
    if strided := re.fullmatch(r"(wikitext2|wikitext103)@hf-stride([1-9]\d*)", name):
        return StridedWikitext(strided[1], int(strided[2]))
    for protocol in _NAMED:
        if protocol.name == name:
            return protocol
    names = ["heldout@bpb", "wikitext2@hf-strideN", "wikitext103@hf-strideN", *(protocol.name for protocol in _NAMED)]
    raise ConfigError(f"{setting}: there is no {name!r}; there are {', '.join(names)}")
