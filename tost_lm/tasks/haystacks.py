"""Haystacks in tokens: a text, or records of one form."""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache
from itertools import count, islice
from pathlib import Path

import numpy as np

from tost_lm.data.shards import Shards
from tost_lm.data.sources import embedded_texts
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import encode_blocks
from tost_lm.errors import DataError
from tost_lm.inference.text_file import TextFile

SENTENCE_ENDS = (".", "!", "?")
BETWEEN = "\n\n"
SPREAD, SPREAD_TOKENS = 64, 1 << 22


class Text:
    """A text in a fixed order, read as far as needed."""

    def __init__(
        self,
        name: str,
        ids: Iterable[np.ndarray],
        facts: dict[str, str],
        shards: Shards | None = None,
    ) -> None:
        """
        Args:
            name: names the text in errors.
            ids: its ids in arrays of any length.
            facts: identify the text in results.
            shards: the shards that it comes from.
        """
        self.name, self.facts, self.shards = name, facts, shards
        self._unread, self._read = iter(ids), list[np.ndarray]()
        self.for_length = cache(self._for_length)

    def _for_length(self, length: int) -> np.ndarray:
        """The ids that haystacks of `length` tokens are taken from, int64: the first arrays with 64 times as many.

        Raises:
            DataError: the text has fewer tokens than `length`.
        """
        wanted, found, tokens = min(SPREAD * length, length + SPREAD_TOKENS), [], 0
        for number in count():
            if number == len(self._read):
                if (array := next(self._unread, None)) is None:
                    break
                self._read.append(array.astype(np.int64))
            found.append(self._read[number])
            tokens += len(found[-1])
            if tokens >= wanted:
                break
        if tokens < length:
            raise DataError(
                f"{self.name} has {tokens:,} tokens, too few for lengths of {length:,}; give a longer text "
                "(haystack=FILE in the settings of the task) or lower lengths"
            )
        return np.concatenate(found)

    @classmethod
    def of_file(cls, path: Path, tokenizer: Tokenizer) -> "Text":
        """Raises DataError when the file is missing, empty or not UTF-8."""
        file = TextFile.check(path, "haystack")
        facts = {"text": str(path), "text_sha256": file.sha256}
        return cls(f"haystack {path}", encode_blocks(tokenizer, file.blocks()), facts)

    @classmethod
    def of_shards(cls, shards: Shards, tokenizer: Tokenizer) -> "Text":
        """The held-out documents."""
        documents = _joined(shards.documents("valid"), tokenizer)
        return cls(f"the held-out text of {shards.folder}", documents, {}, shards)

    @classmethod
    def embedded(cls, tokenizer: Tokenizer) -> "Text":
        """Python's documentation. Raises DataError when this Python has none."""
        digest = hashlib.sha256()
        for text in embedded_texts():
            digest.update(text.encode(errors="replace"))
        facts = {"text": "documentation of Python", "text_sha256": digest.hexdigest()}
        ids = (tokenizer.encode_array(text.encode(errors="replace").decode()) for text in embedded_texts())
        return cls("the documentation of Python", _joined(ids, tokenizer), facts)


def text_haystack(text: Text, length: int, tokens: int, draws: np.random.Generator) -> np.ndarray:
    """`tokens` tokens of a text from a drawn start, int64; `length` as in `Text.for_length`."""
    source = text.for_length(length)
    start = int(draws.integers(len(source) - tokens + 1))
    return source[start : start + tokens]


def records_haystack(
    record: Callable[[str, str], Sequence[int]], tokens: int, draws: np.random.Generator, left_out: Container[str]
) -> np.ndarray:
    """`tokens` tokens of records, int64; the first one may lack its beginning.

    Args:
        record: (key, value) → ids; keys are two or more words, values numbers of seven digits, each once.
        left_out: keys and values that no record has.
    """
    pairs, found, count = zip(word_keys(draws), numbers(draws, 7), strict=True), list[Sequence[int]](), 0
    while count < tokens:
        key, value = next(pairs)
        if key not in left_out and value not in left_out:
            found.append(record(key, value))
            count += len(found[-1])
    return np.concatenate(found).astype(np.int64)[count - tokens :]


def insert_needles(
    tokenizer: Tokenizer, haystack: np.ndarray, needles: Sequence[Sequence[int]], depths: Sequence[float]
) -> np.ndarray:
    """The haystack with a needle at each depth, moved back to the end of a line or sentence: int64. Depths ascend."""
    arrays, begin = [], 0
    for needle, depth in zip(needles, depths, strict=True):
        cut = sentence_end(tokenizer, haystack, depth)
        arrays += [haystack[begin:cut], needle]
        begin = cut
    return np.concatenate([*arrays, haystack[begin:]]).astype(np.int64)


def sentence_end(tokenizer: Tokenizer, haystack: np.ndarray, depth: float) -> int:
    """Index of the last end of a line or sentence at or before the depth; 0 if there is none.

    A sentence ends at a mark before white space, which belongs to the next token.
    """
    for cut in range(round(depth * len(haystack)), 0, -1):
        # Three tokens contain the whole end, unless one of them is a single byte of it.
        around = haystack[max(0, cut - 3) : cut + 1].tolist()
        before = tokenizer.decode(around[: min(cut, 3)])
        after = tokenizer.decode(around)[len(before) :]
        if before.endswith("\n") or (before.endswith(SENTENCE_ENDS) and (cut == len(haystack) or after[:1].isspace())):
            return cut
    return 0


def _joined(documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    between = tokenizer.encode_array(BETWEEN)
    for document in documents:
        yield np.concatenate([document, between])


_ADJECTIVES = """
    amber ancient arctic autumn bitter blue bold bright broken calm careful clever cold coral crimson curious dapper
    dark deep distant dusty eager early eastern empty faint fancy fast fierce final fond frozen gentle giant glad
    golden grand gray green happy hasty hidden hollow honest humble icy idle ivory jolly keen kind large lazy light
    little lively lone loud lucky mellow merry mild misty modest narrow neat nimble noble odd open pale patient plain
    polite proud purple quick quiet rapid rare ready red restless round royal rustic salty sandy scarlet sharp shy
    silent silver simple slow small smooth snowy soft solid southern spare steady still stormy strong sunny sweet swift
    tall tender thin tidy tiny vivid warm western white wild windy wise young
"""
_NOUNS = """
    acorn anchor anvil apron arrow badger barrel basin beacon beetle bell bench birch bison blanket bottle bramble
    bridge brook broom bucket button cabin camel candle canyon carpet castle cedar chapel chestnut cliff clock cloud
    clover comet compass copper cottage cradle crane cricket crow daisy desert dolphin donkey drum eagle easel elm ember
    falcon feather fern ferry fiddle finch flute forest fountain fox garden garnet glacier goat hammer harbor hare
    harvest hazel hedge helmet heron hill hornet island jacket jasmine kettle kite ladder lagoon lantern lark lemon
    lily lizard magnet mango maple marble meadow mirror mole moth mountain needle oak oasis ocean olive orchard otter
    owl oyster paddle parrot pebble pepper pigeon pillow plum pond poppy quarry quilt rabbit raven reef ribbon robin
    rocket saddle sailor salmon shadow shell shepherd sparrow spider spoon spruce squirrel stable stork summit swan
    table thistle thunder ticket tiger tower trout tulip tunnel turtle valley velvet violin wagon walnut whale willow
    window winter wolf wren zebra
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
PAIRS = len(ADJECTIVES) * len(NOUNS)


def word_keys(draws: np.random.Generator) -> Iterator[str]:
    """Such as `amber-falcon`; after half of all pairs, such as `amber-quiet-falcon`."""

    def key(adjectives: int) -> str:
        return "-".join([*(_of(ADJECTIVES, draws) for _ in range(adjectives)), _of(NOUNS, draws)])

    yield from islice(distinct(lambda: key(1)), PAIRS // 2)
    yield from distinct(lambda: key(2))


def numbers(draws: np.random.Generator, digits: int) -> Iterator[str]:
    """Numbers of `digits` digits, the first one not 0."""
    return distinct(lambda: str(draws.integers(10 ** (digits - 1), 10**digits)))


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Distinct draws. The iterator is endless, so `draw` must have enough values."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def _of(words: Sequence[str], draws: np.random.Generator) -> str:
    return words[int(draws.integers(len(words)))]
