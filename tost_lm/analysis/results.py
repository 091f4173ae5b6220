"""Results of each analysis as plain data: `tost eval analyze` writes them and `tost report` shows them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tost_lm.analysis.ablations import ablation_losses, summarize_losses
from tost_lm.analysis.coding_rate import branch_rates, layer_rates, summarize_rates
from tost_lm.analysis.coloured_text import coloured_page
from tost_lm.analysis.influence import influence
from tost_lm.analysis.memberships import ByPosition, after_context, by_position
from tost_lm.analysis.slots import read_ages
from tost_lm.analysis.stream import LARGE_NORM_MEDIANS, stream_statistics
from tost_lm.analysis.subspaces import layer_subspaces, means
from tost_lm.analysis.text import WORD_CLASSES, HeldoutText, word_classes
from tost_lm.analysis.tokens import explained_by, surplus_of_text, surpluses, typical
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.incremental import decode_ids, token_text
from tost_lm.errors import CheckpointError
from tost_lm.files import write_atomically
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.checkpoint import load
from tost_lm.model.positions import position_ends

WORD, WORD_CLASS, DOCUMENT = "word", "word class", "document"
LISTED_WORDS, MIN_TOKENS, MIN_ERRORS = 8, 5, 4.0  # 1 of 16,000 random groups is beyond 4 standard errors
COLOURED_TOKENS = 300
GROUPS, LONGEST = 4, 5
SWAPS = 4


@dataclass(frozen=True)
class Analysis:
    """A model and its held-out text."""

    model: TostLM
    text: HeldoutText
    tokenizer: Tokenizer
    information_V: Tensor
    """Unigram information in nats."""

    @property
    def sequences(self) -> Tensor:
        """Tokens [N, T]."""
        return self.text.sequences_NT

    @cached_property
    def by_position(self) -> ByPosition:
        return by_position(self.model, self.sequences)


def fitting_contexts(model: ModelConfig, contexts: Sequence[int], probe_tokens: int) -> list[int]:
    """Those of the increasing numbers of context tokens that fit into the model's positions together with a probe."""
    limit = model.position_limit
    return [n for n in contexts if limit is None or n + _probe_tokens(model, probe_tokens) <= limit]


def memberships(of: Analysis, probe_tokens: int, contexts: Sequence[int]) -> dict[str, Any]:
    """Memberships by position, and those of the first `probe_tokens` after each number of context tokens."""
    model, found = of.model.config, of.by_position
    amounts, probe_tokens = fitting_contexts(model, contexts, probe_tokens), _probe_tokens(model, probe_tokens)
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
    """Preferences of the heads for tokens; writes a text coloured by head to `page`."""
    tokens_K, word_NT = of.sequences.unique(return_inverse=True)
    classes_C, class_K = word_classes(of.tokenizer, tokens_K).unique(return_inverse=True)
    document_NT = of.text.documents_NT.unique(return_inverse=True)[1]
    labels = {WORD: word_NT, WORD_CLASS: class_K[word_NT], DOCUMENT: document_NT}
    found = surpluses(of.model, of.sequences, of.by_position, labels)
    texts = [token_text(of.tokenizer, token) for token in tokens_K.tolist()]
    sizes = found.sizes[WORD].tolist()

    def listed(groups: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"text": texts[word], "tokens": sizes[word], "surplus": surplus} for word, surplus in groups]

    lists = typical(found, WORD, groups=LISTED_WORDS, tokens=MIN_TOKENS, errors=MIN_ERRORS)
    of_classes_CLH = found.by_group[WORD_CLASS] / found.sizes[WORD_CLASS][:, None, None]
    write_atomically(page, _coloured(of))
    return {
        "explained": {name: explained_by(found, name) for name in labels},
        "word_classes": [list(WORD_CLASSES)[number] for number in classes_C.tolist()],
        "word_class_tokens": found.sizes[WORD_CLASS].tolist(),
        "word_class_surplus": of_classes_CLH.transpose(0, 1).tolist(),
        "least_tokens": MIN_TOKENS,
        "least_errors": MIN_ERRORS,
        "layers": [[{"most": listed(head.most), "least": listed(head.least)} for head in heads] for heads in lists],
    }


def coding_rates(of: Analysis, kept: Sequence[Path]) -> dict[str, Any]:
    """Coding rates of each TSSA layer, also by retained checkpoint of the run (`kept`)."""
    steps, left_out, documents_N = [], [], of.text.document_of
    for folder in kept:
        try:
            model = load(folder, str(of.sequences.device))
        except CheckpointError as error:
            left_out.append(str(error))
            continue
        layers = summarize_rates([branch_rates(model, tokens_T) for tokens_T in of.sequences], documents_N)
        steps.append({"step": int(folder.name.removeprefix("step_")), "layers": layers})
    return {
        "position_ends": position_ends(of.sequences.shape[1]),
        "layers": summarize_rates([layer_rates(of.model, tokens_T) for tokens_T in of.sequences], documents_N),
        "steps": steps,
        "left_out_checkpoints": left_out,
    }


def subspaces(of: Analysis) -> dict[str, Any]:
    """Subspaces of each TSSA layer, with their means over heads."""
    layers = layer_subspaces(of.model, of.sequences)
    return {"layers": [{**layer._asdict(), "mean": means(layer)} for layer in layers]}


def stream(of: Analysis) -> dict[str, Any]:
    """Statistics of the residual stream by unigram information, and the tokens with the largest norms."""
    information_NT = of.information_V.to(of.sequences.device)[of.sequences]
    groups, layers = stream_statistics(of.model, of.sequences, information_NT, GROUPS, LONGEST)

    def describe(n: int, position: int, medians: float) -> dict[str, Any]:
        text = token_text(of.tokenizer, int(of.sequences[n, position]))
        return {"text": text, "sequence": n, "position": position, "medians": medians}

    norms = [{**layer._asdict(), "longest": [describe(*token) for token in layer.longest]} for layer in layers]
    return {"groups": [group._asdict() for group in groups], "long_medians": LARGE_NORM_MEDIANS, "layers": norms}


def influences(of: Analysis) -> dict[str, Any]:
    """Influence of replaced tokens by distance."""
    found = influence(of.model, of.sequences, of.text.document_of, SWAPS)
    return {"swaps": SWAPS * len(of.sequences), **found._asdict()}


def slots(of: Analysis) -> dict[str, Any]:
    """Half-lives of slot layers, and the ages of what they read."""
    return read_ages(of.model, of.sequences, of.text.document_of)._asdict()


def ablations(of: Analysis) -> dict[str, Any]:
    """Losses with ablations of the operator."""
    return {"losses": summarize_losses(ablation_losses(of.model, of.sequences), of.text.document_of)}


def _probe_tokens(model: ModelConfig, wanted: int) -> int:
    return min(wanted, model.max_positions - 1)  # the last token of a sequence is only a label


def _coloured(of: Analysis) -> str:
    tokens_T = of.sequences[0, :COLOURED_TOKENS]
    *texts, rest = decode_ids(of.tokenizer, tokens_T.tolist())
    texts[-1] += rest
    shown = ["∎" if token == of.tokenizer.eot else text for token, text in zip(tokens_T.tolist(), texts, strict=True)]
    return coloured_page("Text coloured by head", shown, surplus_of_text(of.model, tokens_T, of.by_position))
