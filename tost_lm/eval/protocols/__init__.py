"""The zero-shot protocols by name."""

import re

from tost_lm.errors import ConfigError, did_you_mean
from tost_lm.eval.protocols.authors import GeneratedLastWord, RandomWindows, WholePassage, joined
from tost_lm.eval.protocols.interface import Example, Protocol, Row, is_gpt2_tokenizer
from tost_lm.eval.protocols.missing_word import LastToken, LastWord, MissingWord, passages
from tost_lm.eval.protocols.multiple_choice import MultipleChoice
from tost_lm.eval.protocols.perplexity import (
    LastBytes,
    OpenWebText,
    PennTreebank,
    StridedWikitext,
    WikitextPages,
    openwebtext_ids,
    ptb_lines,
    wikitext_rows,
)

__all__ = ["Example", "Protocol", "Row", "find_protocol", "is_gpt2_tokenizer"]

_PROTOCOLS: list[Protocol] = [
    WikitextPages("wikitext2"),
    WikitextPages("wikitext103"),
    LastWord("lambada_openai"),
    LastToken("lambada_openai"),
    LastWord("lambada_standard"),
    MissingWord("cbt_cn"),
    MissingWord("cbt_ne"),
    MultipleChoice("hellaswag", headline="normalized_accuracy"),
    MultipleChoice("arc_easy"),
    MultipleChoice("arc_challenge", headline="normalized_accuracy"),
    MultipleChoice("piqa"),
    PennTreebank(),
    LastBytes("enwik8@bpb"),
    LastBytes("text8@bpc"),
    OpenWebText(),
    RandomWindows("owt", openwebtext_ids),
    RandomWindows("wikitext2", joined(wikitext_rows)),
    RandomWindows("wikitext103", joined(wikitext_rows)),
    RandomWindows("lambada_standard", joined(passages)),
    RandomWindows("ptb", joined(ptb_lines)),
    GeneratedLastWord("lambada_openai"),
    WholePassage("cbt_cn"),
    WholePassage("cbt_ne"),
]


def find_protocol(name: str, setting: str = "zero_shot.protocols") -> Protocol:
    """The protocol of this name. Raises ConfigError with all names if there is none."""
    if strided := re.fullmatch(r"(wikitext2|wikitext103)@hf-stride([1-9]\d*)", name):
        return StridedWikitext(strided[1], int(strided[2]))
    for protocol in _PROTOCOLS:
        if protocol.name == name:
            return protocol
    names = ["heldout@bpb", "wikitext2@hf-strideN", "wikitext103@hf-strideN"]
    names += [protocol.name for protocol in _PROTOCOLS]
    raise ConfigError(
        f"{setting}: {name!r} is not a protocol{did_you_mean(name, names)}; choose from {', '.join(names)}"
    )
