"""What is written of each analysis, as plain data; eval.analyze keeps it and eval.report shows it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tost_lm.analysis.coding_rate import branch_rates, layer_rates, summed_up
from tost_lm.analysis.coloured_text import coloured_page
from tost_lm.analysis.influence import influence
from tost_lm.analysis.memberships import ByPosition, after_context, by_position
from tost_lm.analysis.stream import LONG, follow
from tost_lm.analysis.subspaces import layer_subspaces, means
from tost_lm.analysis.swaps import beside_as_it_is, swapped_losses
from tost_lm.analysis.text import WORD_CLASSES, HeldoutText, word_classes
from tost_lm.analysis.tokens import explained_by, surplus_of_text, surpluses, typical
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.piecewise import decode_ids, token_text
from tost_lm.errors import CheckpointError
from tost_lm.files import write_whole
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.checkpoint import load
from tost_lm.model.positions import position_ends

WORD, WORD_CLASS, DOCUMENT = "word", "word class", "document"
LISTED_WORDS, LEAST_TOKENS, LEAST_ERRORS = 8, 5, 4.0  # of thousands of words one is 4 errors off by lot
COLOURED_TOKENS = 300
GROUPS, LONGEST = 4, 5
SWAPS = 4


@dataclass(frozen=True)
class Analysis:
    """A model and the text that it is watched on."""

    model: TostLM
    text: HeldoutText
    tokenizer: Tokenizer
    information_V: Tensor
    """Of each word, nats."""

    @property
    def sequences(self) -> Tensor:
        """Tokens [N, T]."""
        return self.text.sequences_NT

    @cached_property
    def by_position(self) -> ByPosition:
        return by_position(self.model, self.sequences)


def readable(model: ModelConfig, contexts: Sequence[int], probe_tokens: int) -> list[int]:
    """How many tokens of other text, of these rising numbers, a model can read before a probe of a sequence."""
    limit = model.position_limit
    return [n for n in contexts if limit is None or n + _probe_tokens(model, probe_tokens) <= limit]


def memberships(of: Analysis, probe_tokens: int, contexts: Sequence[int]) -> dict[str, Any]:
    """By position, and of the first `probe_tokens` after `contexts` of so many tokens of other text."""
    model, found = of.model.config, of.by_position
    amounts, probe_tokens = readable(model, contexts, probe_tokens), _probe_tokens(model, probe_tokens)
    after = after_context(of.model, of.sequences[:, : probe_tokens + 1], of.text.context_S, amounts)
    return {
        "probe_tokens": probe_tokens,
        "position_ends": position_ends(model.max_positions),
        "concentration_by_position": found.concentration,
        "score_spread_by_position": found.spread,
        "explained_by_position": found.explained,
        "explained_within_stretches": found.explained_within,
        "after_context": [asdict(row) for row in after],
        "left_out_contexts": list(contexts[len(amounts) :]),
        "limit": model.position_limit,
    }


def tokens(of: Analysis, page: Path) -> dict[str, Any]:
    """Which tokens the heads take; a text coloured by head is written to `page`."""
    words_K, word_NT = of.sequences.unique(return_inverse=True)
    classes_C, class_K = word_classes(of.tokenizer, words_K).unique(return_inverse=True)
    document_NT = of.text.documents_NT.unique(return_inverse=True)[1]
    labels = {WORD: word_NT, WORD_CLASS: class_K[word_NT], DOCUMENT: document_NT}
    found = surpluses(of.model, of.sequences, of.by_position, labels)
    texts = [token_text(of.tokenizer, word) for word in words_K.tolist()]
    sizes = found.sizes[WORD].tolist()

    def listed(groups: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"text": texts[word], "tokens": sizes[word], "surplus": surplus} for word, surplus in groups]

    lists = typical(found, WORD, groups=LISTED_WORDS, tokens=LEAST_TOKENS, errors=LEAST_ERRORS)
    of_classes_CLH = found.by_group[WORD_CLASS] / found.sizes[WORD_CLASS][:, None, None]
    write_whole(page, _coloured(of))
    return {
        "explained": {name: explained_by(found, name) for name in labels},
        "word_classes": [list(WORD_CLASSES)[number] for number in classes_C.tolist()],
        "word_class_tokens": found.sizes[WORD_CLASS].tolist(),
        "word_class_surplus": of_classes_CLH.transpose(0, 1).tolist(),
        "least_tokens": LEAST_TOKENS,
        "least_errors": LEAST_ERRORS,
        "layers": [[{"most": listed(head.most), "least": listed(head.least)} for head in heads] for heads in lists],
    }


def coding_rates(of: Analysis, kept: Sequence[Path]) -> dict[str, Any]:
    """`summed_up` of each TSSA layer, and of its branch in each of the checkpoints that a run keeps."""
    steps, left_out, documents_N = [], [], of.text.document_of
    for folder in kept:
        try:
            model = load(folder, str(of.sequences.device))
        except CheckpointError as error:
            left_out.append(str(error))
            continue
        layers = summed_up([branch_rates(model, tokens_T) for tokens_T in of.sequences], documents_N)
        steps.append({"step": int(folder.name.removeprefix("step_")), "layers": layers})
    return {
        "position_ends": position_ends(of.sequences.shape[1]),
        "layers": summed_up([layer_rates(of.model, tokens_T) for tokens_T in of.sequences], documents_N),
        "steps": steps,
        "left_out_checkpoints": left_out,
    }


def subspaces(of: Analysis) -> dict[str, Any]:
    """`Subspaces` of each TSSA layer, with their means over heads."""
    layers = layer_subspaces(of.model, of.sequences)
    return {"layers": [{**layer._asdict(), "mean": means(layer)} for layer in layers]}


def stream(of: Analysis) -> dict[str, Any]:
    """Tokens followed by their information, and the longest of the residual stream."""
    information_NT = of.information_V.to(of.sequences.device)[of.sequences]
    groups, layers = follow(of.model, of.sequences, information_NT, GROUPS, LONGEST)

    def told(n: int, position: int, medians: float) -> dict[str, Any]:
        word = int(of.sequences[n, position])
        return {"text": token_text(of.tokenizer, word), "sequence": n, "position": position, "medians": medians}

    lengths = [{**layer._asdict(), "longest": [told(*place) for place in layer.longest]} for layer in layers]
    return {"groups": [group._asdict() for group in groups], "long_medians": LONG, "layers": lengths}


def influences(of: Analysis) -> dict[str, Any]:
    """`Influence`, and of how many swaps."""
    found = influence(of.model, of.sequences, of.text.document_of, SWAPS)
    return {"swaps": SWAPS * len(of.sequences), **found._asdict()}


def swaps(of: Analysis) -> dict[str, Any]:
    """The losses without parts of the operator."""
    return {"losses": beside_as_it_is(swapped_losses(of.model, of.sequences), of.text.document_of)}


def _probe_tokens(model: ModelConfig, wanted: int) -> int:
    return min(wanted, model.max_positions - 1)  # the last token of a sequence is a label only


def _coloured(of: Analysis) -> str:
    tokens_T = of.sequences[0, :COLOURED_TOKENS]
    *texts, rest = decode_ids(of.tokenizer, tokens_T.tolist())
    texts[-1] += rest
    shown = ["∎" if token == of.tokenizer.eot else text for token, text in zip(tokens_T.tolist(), texts, strict=True)]
    return coloured_page("Text coloured by head", shown, surplus_of_text(of.model, tokens_T, of.by_position))
