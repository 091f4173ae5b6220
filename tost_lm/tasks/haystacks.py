"""Haystacks in tokens (text, a few repeated sentences, or other needles), and keys and values of needles."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count, islice
from pathlib import Path
from string import ascii_uppercase
from uuid import UUID

import numpy as np

from tost_lm.data.shards import Shards
from tost_lm.data.sources import embedded_texts
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import encode_blocks
from tost_lm.errors import DataError
from tost_lm.inference.text_file import TextFile

SENTENCE_ENDS = (".", "!", "?")
NOISE = (
    "A boat lies in the harbor.\nThe bread on the table is warm.\nTwo birds sit on the roof.\n"
    "The path goes down to the river.\nIt rained a little in the morning.\n"
)
BETWEEN = "\n\n"
SPREAD, SPREAD_TOKENS = 64, 1 << 22

Haystack = Callable[[int], np.ndarray]
"""Returns a haystack of n tokens for an example, int64 [n]."""


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


def text_haystack(text: Text, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
    """Up to `tokens` tokens of a text, from a drawn start."""
    source = text.for_length(length)
    start = int(draws.integers(len(source) - tokens + 1))
    return lambda n: source[start : start + n]


def noise_haystack(tokenizer: Tokenizer) -> Haystack:
    """Repeated sentences, cut at the beginning."""
    cycle = np.array(tokenizer.encode(NOISE))
    return lambda n: np.resize(cycle[::-1], n)[::-1]


def needles_haystack(tokenizer: Tokenizer, needles: Iterator[Sequence[int]]) -> Haystack:
    """The first needles of an endless sequence, as many as fit, after repeated sentences that fill the rest."""
    drawn: list[Sequence[int]] = []
    noise = noise_haystack(tokenizer)

    def haystack(n: int) -> np.ndarray:
        used: list[Sequence[int]] = []
        rest = n
        while True:
            if len(used) == len(drawn):
                drawn.append(next(needles))
            needle = drawn[len(used)]
            if len(needle) > rest:
                return np.concatenate([noise(rest), *used]).astype(np.int64)
            used.append(needle)
            rest -= len(needle)

    return haystack


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


def uuids(draws: np.random.Generator) -> Iterator[str]:
    """UUIDs of version 4, with 122 random bits."""
    return distinct(lambda: str(UUID(bytes=draws.bytes(16), version=4)))


def variables(draws: np.random.Generator, letters: int) -> Iterator[str]:
    """Names of `letters` capital letters."""
    return distinct(lambda: "".join(_of(ascii_uppercase, draws) for _ in range(letters)))


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Distinct draws. The iterator is endless, so `draw` must have enough values."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def listed(values: Sequence[str]) -> list[str]:
    """The strings of ` a, b and c`; each value with the space before it is a string of its own."""
    strings = []
    for place, value in enumerate(values):
        if place:
            strings.append(" and" if place == len(values) - 1 else ",")
        strings.append(f" {value}")
    return strings


def _of(words: Sequence[str], draws: np.random.Generator) -> str:
    return words[int(draws.integers(len(words)))]
