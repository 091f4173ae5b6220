"""What is hidden and asked for: keys, numbers, UUIDs and names of variables, none twice in a text."""

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
    """`amber-falcon` and the like; once half of all pairs are out, `amber-quiet-falcon`."""

    def key(adjectives: int) -> str:
        return "-".join([*(_of(ADJECTIVES, draws) for _ in range(adjectives)), _of(NOUNS, draws)])

    yield from islice(distinct(lambda: key(1)), PAIRS // 2)
    yield from distinct(lambda: key(2))


def numbers(draws: np.random.Generator, digits: int) -> Iterator[str]:
    """Of so many digits, the first of them not 0."""
    return distinct(lambda: str(draws.integers(10 ** (digits - 1), 10**digits)))


def uuids(draws: np.random.Generator) -> Iterator[str]:
    """Of version 4, whose 122 bits are random."""
    return distinct(lambda: str(UUID(bytes=draws.bytes(16), version=4)))


def variables(draws: np.random.Generator, letters: int) -> Iterator[str]:
    """Names of so many capital letters."""
    return distinct(lambda: "".join(_of(ascii_uppercase, draws) for _ in range(letters)))


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """What is drawn, without what was drawn before; endless, so `draw` must have enough."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def listed(values: Sequence[str]) -> list[str]:
    """The parts of ` a, b and c`, each value with the space before it a part of its own."""
    parts = []
    for place, value in enumerate(values):
        if place:
            parts.append(" and" if place == len(values) - 1 else ",")
        parts.append(f" {value}")
    return parts


def _of(words: Sequence[str], draws: np.random.Generator) -> str:
    return words[int(draws.integers(len(words)))]
