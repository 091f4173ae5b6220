"""The score of any text file, read as one stream in constant memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.text_file import TextFile
from tost_lm.markdown import escape, table
from tost_lm.page import Page
from tost_lm.redaction import redact_text
from tost_lm.tasks.evaluated_model import EvaluatedModel, checkpoint_line, state_growth
from tost_lm.tasks.task import Family, Inputs, Measurement, Place, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel

NAME = "text@bpb"


class TextConfig(Section):
    """Task `text@bpb`."""

    file: Path | None = None
    """A UTF-8 text of any size, scored as one document."""


class TextStream(Task):
    """Each token is predicted from all tokens before it in the file. Memory does not grow with the text, except that
    softmax layers without a window keep keys and values of all tokens. A model with learned positions reads no more
    tokens than it has positions."""

    name, about = NAME, "bits per byte of the file text.file, read as one stream"
    headline, column = "bits_per_byte", ("text file, bits per byte", ".4f")
    reads_one_stream = True

    def open(self, inputs: Inputs, family: Family) -> Measurement:
        settings = inputs.config.text
        if settings.file is None:
            raise ConfigError("text.file: must be set; give a UTF-8 text")
        text = TextFile.check(settings.file, "text.file")
        identity = {"text_sha256": text.sha256, "settings": {"text": settings.model_dump(mode="json")}}

        def measure(model: "LanguageModel", ranks: Ranks, place: Place | None) -> Row:
            from tost_lm.inference.generation import state_bytes
            from tost_lm.inference.long_text import score_text

            print(f"scoring {text.path}, {text.bytes:,} bytes", flush=True)
            if model.config.kept_tokens is None and model.config.position_limit is None:
                print("the model keeps all tokens: memory and time per token grow with the text", flush=True)
            scores, state = score_text(model, inputs.lossless_tokenizer, text, ranks)
            bytes_of_state = state_bytes(state, ranks.tensor_ranks)
            print(
                f"{scores['bits_per_byte']:.4f} bits/byte, {scores['nats_per_token']:.4f} nats/token, perplexity "
                f"{scores['perplexity_per_token']:,.2f} over {scores['tokens']:,} tokens, {scores['bytes']:,} bytes"
            )
            print(f"final state: {bytes_of_state:,} bytes")
            return {"model": scores, "kept_tokens": model.config.kept_tokens, "state_bytes": bytes_of_state}

        return Measurement(identity, lambda model: measure)


def section(run: EvaluatedModel, page: Page) -> str:
    """Score of a text file; empty without results."""
    results = run.results(NAME)
    if results is None:
        return ""
    model, path = results["model"], redact_text(results["identity"]["settings"]["text"]["file"])
    scores = f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", f"{model['bits_per_byte']:.4f}"
    return "\n\n".join([
        f"## Text file ({escape(NAME)})",
        checkpoint_line(run, results),
        table(("text", "nats per token", "perplexity per token", "bits per byte"), [(path, *scores)]),
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes. Each token is predicted from all earlier ones; "
        f"end-of-text tokens do not count. Size of the final state: {results['state_bytes']:,} bytes; "
        f"{state_growth(results)}.",
    ])  # fmt: skip


FAMILY = Family("text", [TextStream()], TextConfig, section)
