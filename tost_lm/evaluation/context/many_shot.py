"""Many-shot mapping of words to labels, protocols `many_shot_seen@own-words` and `many_shot_unseen@own-words`.

    Each line has a word and the label of its kind.
    falcon C
    hammer A
    …
    heron → C

There are eight kinds of words and eight labels. Each example permutes the labels, so the mapping must be read from its
shots. The kinds are equally frequent. In `seen`, the word of the question is in the shots; in `unseen` it is not, so
the model must know which words are of one kind. The answer is the likeliest of the eight labels; chance is 1/8. The
labels of the control's shots are drawn independently of the words.
"""

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.context.counted import CountedTask
from tost_lm.evaluation.context_config import LABELS, MANY_SHOT_SEEN
from tost_lm.evaluation.retrieval.tasks import Example

KINDS = tuple(
    tuple(line.split())
    for line in (
        "falcon heron eagle crow swan duck goose owl robin pigeon parrot hawk",
        "hammer saw drill chisel wrench pliers axe file shovel rake needle knife",
        "apple pear plum cherry peach lemon grape mango orange banana melon fig",
        "red blue green yellow purple brown black white pink grey violet crimson",
        "doctor teacher baker farmer lawyer sailor painter nurse cook judge pilot tailor",
        "car train bus ship truck bicycle plane boat tram wagon ferry taxi",
        "shirt coat hat shoe sock glove scarf dress jacket belt skirt boot",
        "guitar piano violin flute drum trumpet harp cello organ banjo clarinet oboe",
    )
)
NAMES = tuple("ABCDEFGH")
INTRO = "Each line has a word and the label of its kind.\n"
assert len(KINDS) == len(NAMES) == LABELS


class ManyShot(CountedTask):
    """One of the two protocols."""

    chance, conditions = 1 / LABELS, ("mapping", "control")
    counted, counts = "shots", tuple(2**n for n in range(3, 13))

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(seed, tokenizer)
        self.name, self.is_seen = name, name == MANY_SHOT_SEEN
        self.labels = tuple(tuple(self.encode(f" {name}")) for name in NAMES)
        self.room = max(map(len, self.labels))
        longest = max(len(self.encode(word)) for words in KINDS for word in words)
        self.frame = 1 + len(self.encode(INTRO)) + longest + self.room
        self.longest = longest + self.room + len(self.encode("\n"))

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        kinds = draws.permutation(np.resize(draws.permutation(LABELS), count))
        asked = int(draws.integers(LABELS))
        new = int(draws.integers(len(KINDS[asked])))
        words = [self._draw(int(kind), new if kind == asked else None, draws) for kind in kinds]
        of_kind = [word for kind, word in zip(kinds, words, strict=True) if kind == asked]
        question = of_kind[int(draws.integers(len(of_kind)))] if self.is_seen else KINDS[asked][new]
        label_of_kind = draws.permutation(LABELS)
        right = int(label_of_kind[asked])

        def make(labels: np.ndarray) -> Example:
            shots = [x for word, label in zip(words, labels, strict=True) for x in (word, f" {NAMES[label]}", "\n")]
            return Example(self.join([INTRO, *shots, question]), question, (), self.labels, right)

        return make(label_of_kind[kinds]), make(draws.integers(LABELS, size=count))

    def _draw(self, kind: int, left_out: int | None, draws: np.random.Generator) -> str:
        """A word of a kind, without the one with the index `left_out`."""
        words = KINDS[kind] if left_out is None else KINDS[kind][:left_out] + KINDS[kind][left_out + 1 :]
        return words[int(draws.integers(len(words)))]
