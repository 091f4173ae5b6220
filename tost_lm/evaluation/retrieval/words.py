"""Keys and values of needles: words, numbers, UUIDs and names of variables, all distinct in a text."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from string import ascii_uppercase
from uuid import UUID

import numpy as np

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
