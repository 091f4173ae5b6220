"""Test sets measured in the course of training, by the code that `eval.zero_shot` measures a checkpoint by."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.evaluation.data_sets import SetFile, find_set_file
from tost_lm.evaluation.protocols import Example, Protocol, Row, find_protocol
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import HELDOUT
from tost_lm.evaluation.zero_shot import score_rows
from tost_lm.evaluation.zero_shot_config import DataSetsConfig
from tost_lm.parallel.whole import WholeModel

if TYPE_CHECKING:
    from tost_lm.parallel.mesh import Mesh


@dataclass(frozen=True)
class ProtocolsInTraining:
    """Protocols with the files that they read and their examples."""

    protocols: Sequence[tuple[Protocol, SetFile, Sequence[Example]]]
    batch_tokens: int | None

    @classmethod
    def find(
        cls, names: Sequence[str], sets: Mapping[str, Path], tokenizer: Tokenizer, window: int, batch_tokens: int | None
    ) -> "ProtocolsInTraining":
        """The test sets of the recipe's section `evaluation`.

        Args:
            names: of protocols.
            sets: the files that are given; others are fetched.
            window: tokens that the model reads at once.

        Raises:
            ConfigError: there is no such protocol or test set, or a file that is not given cannot be had.
            DataError: a file is not there, or not in the protocol's format.
        """
        given = validate(DataSetsConfig, {name: str(path) for name, path in sets.items()}, "evaluation.sets")
        if HELDOUT in names:
            raise ConfigError(
                f"evaluation.protocols: {HELDOUT} is measured by eval.zero_shot alone; in the course of training "
                "validation.every measures the loss on held-out documents"
            )
        protocols = [find_protocol(name, "evaluation.protocols") for name in dict.fromkeys(names)]
        files = [find_set_file(protocol.data_set, given, "evaluation.sets") for protocol in protocols]
        examples = [each.examples(file.path, tokenizer, window) for each, file in zip(protocols, files, strict=True)]
        return cls(list(zip(protocols, files, examples, strict=True)), batch_tokens)

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must have alike."""
        return {f"test set {protocol.data_set}": file.sha256 for protocol, file, _ in self.protocols}

    def measure(self, engine: Any, mesh: "Mesh", beat: Callable[[], None]) -> list[Row]:
        """The totals of each protocol, as in its results.json, and which of them is the headline.

        All ranks call it and get the same; copies of the model share the examples.

        Args:
            engine: of the model that is trained, at any ZeRO stage.
            beat: called for each protocol and each batch.
        """
        model = WholeModel(engine.module, mesh)
        model.model = engine  # at ZeRO stage 3 it is what gathers a weight that another layer uses, too
        ranks = Ranks(engine.global_rank, mesh, beat)
        measured = []
        engine.eval()
        with redirect_stdout(io.StringIO()):  # the run's log has a line of its own
            for protocol, file, examples in self.protocols:
                beat()
                rows = score_rows(ranks, model, protocol, examples, self.batch_tokens)
                names = {"protocol": protocol.name, "headline": protocol.headline, "data_sha256": file.sha256}
                measured.append(names | protocol.totals(rows))
        engine.train()
        return measured
