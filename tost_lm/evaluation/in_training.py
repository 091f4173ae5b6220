"""Evaluation on test sets during training, with the code of `tost eval zero-shot`."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import DataSetsConfig
from tost_lm.evaluation.data_sets import SetFile, find_set_file
from tost_lm.evaluation.protocols import Example, Protocol, Row, find_protocol
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import HELDOUT
from tost_lm.evaluation.zero_shot import score_rows
from tost_lm.parallel.sharded_inference import ShardedInference

if TYPE_CHECKING:
    from tost_lm.parallel.mesh import Mesh


@dataclass(frozen=True)
class ProtocolsInTraining:
    """Protocols with their files and examples."""

    protocols: Sequence[tuple[Protocol, SetFile, Sequence[Example]]]
    batch_tokens: int | None

    @classmethod
    def find(
        cls, names: Sequence[str], sets: Mapping[str, Path], tokenizer: Tokenizer, window: int, batch_tokens: int | None
    ) -> "ProtocolsInTraining":
        """The test sets of the recipe's section `evaluation`.

        Args:
            names: names of protocols.
            sets: files of test sets; others are downloaded.
            window: tokens that the model reads at once.

        Raises:
            ConfigError: a protocol or test set does not exist, or a file is not given and cannot be downloaded.
            DataError: a file is missing or does not have the protocol's format.
        """
        given = validate(DataSetsConfig, {name: str(path) for name, path in sets.items()}, "evaluation.sets")
        if HELDOUT in names:
            raise ConfigError(
                f"evaluation.protocols: {HELDOUT} is measured only by tost eval zero-shot; set validation.every, "
                "which measures the loss on held-out documents"
            )
        protocols = [find_protocol(name, "evaluation.protocols") for name in dict.fromkeys(names)]
        if generating := [protocol.name for protocol in protocols if protocol.new_tokens]:
            raise ConfigError(
                f"evaluation.protocols: {generating[0]} generates text, which training does not; remove it, and "
                "measure checkpoints with tost eval zero-shot"
            )
        files = [find_set_file(protocol.data_set, given, "evaluation.sets") for protocol in protocols]
        examples = [each.examples(file.path, tokenizer, window) for each, file in zip(protocols, files, strict=True)]
        return cls(list(zip(protocols, files, examples, strict=True)), batch_tokens)

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        return {f"test set {protocol.data_set}": file.sha256 for protocol, file, _ in self.protocols}

    def measure(self, engine: Any, mesh: "Mesh", beat: Callable[[], None]) -> list[Row]:
        """The totals of each protocol as in its results.json, and the name of its headline.

        All ranks call it and get the same results; the copies of the model share the examples.

        Args:
            engine: of the model in training, at any ZeRO stage.
            beat: called before each protocol and each batch, equally often by all ranks.
        """
        model = ShardedInference(engine.module, mesh)
        model.model = engine  # at ZeRO stage 3 it also gathers a weight that another layer uses
        ranks = Ranks(engine.global_rank, mesh, beat)
        measured = []
        engine.eval()
        with redirect_stdout(io.StringIO()):  # the run's log has its own line
            for protocol, file, examples in self.protocols:
                beat()
                rows = score_rows(ranks, model, protocol, examples, self.batch_tokens)
                names = {"protocol": protocol.name, "headline": protocol.headline, "data_sha256": file.sha256}
                measured.append(names | protocol.totals(rows))
        engine.train()
        return measured
