"""The loss on held-out documents during training.

Shape suffixes: B rows, T tokens of a row, P ranges of positions, C corpora, A micro-batches, N samples of one.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tost_lm.data.loader import Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches
from tost_lm.errors import DataError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.positions import position_ends
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.mesh import Mesh, all_reduce
from tost_lm.pretrain.batches import build_batches
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.tiled import Tiling

LOG_EVERY_S = 10.0


def build_validation(config: PretrainConfig, corpora: Corpora, mesh: Mesh, tiling: Tiling) -> "Validation | None":
    """None: `validation.interval` is not set."""
    if config.validation.interval is None:
        return None
    batches = build_batches(config, corpora, mesh, tiling, "valid")
    return Validation(batches, mesh, tiling, config.train.seq_len, config.validation.sequences)


class Validation:
    """The loss of one batch of held-out documents, the same batch each time."""

    def __init__(self, batches: TrainingBatches, mesh: Mesh, tiling: Tiling, seq_len: int, sequences: int) -> None:
        """`sequences` were requested; `batches` has fewer if one pass over the held-out split has fewer."""
        self._batches, self._mesh, self._tiling, self._seq_len = batches, mesh, tiling, seq_len
        self.position_ends = position_ends(seq_len)
        self._notice = ""
        if batches.samples is not None and batches.samples < sequences:
            self._notice = (
                f"validation.sequences {sequences:,} is more than one pass over the held-out split: using its "
                f"{batches.samples:,} sequences"
            )

    def measure(
        self, engine: Engine, beat: Callable[[], None] = lambda: None, log: Callable[[str], None] = print
    ) -> dict[str, Any]:
        """Nats per token, in total, by position in the document and, of a mixture, by its corpora: the same on all
        ranks, which all call it.

        Args:
            beat: called after each micro-batch; may raise.
            log: reports progress every LOG_EVERY_S seconds, and once that there are fewer sequences than requested.

        Raises:
            DataError: no token counts.
        """
        if self._notice:
            log(self._notice)
            self._notice = ""
        batches = micro_batches(self._batches[0], self._mesh.device)
        ends_P = torch.tensor(self.position_ends, device=self._mesh.device)
        corpus_AN = torch.from_numpy(self._batches.corpora_of(0)).view(len(batches), -1).to(self._mesh.device)
        corpora, ranges = len(self._batches.folders), len(ends_P)
        nats_CP = torch.zeros(corpora * ranges, dtype=torch.float64, device=self._mesh.device)
        count_CP = torch.zeros_like(nats_CP)
        started = logged = time.monotonic()
        engine.set_training(False)
        with torch.no_grad():
            for done, batch in enumerate(batches, start=1):
                nats_BT, position_BT, sample_BT = self._losses(engine, batch)
                counted_BT = batch.labels != IGNORED_LABEL
                range_of = torch.bucketize(position_BT.expand_as(nats_BT)[counted_BT], ends_P, right=True)
                corpus_of = corpus_AN[done - 1][sample_BT.expand_as(nats_BT)[counted_BT]]
                cell_of = corpus_of * ranges + range_of
                nats_CP.index_add_(0, cell_of, nats_BT[counted_BT].double())
                count_CP.index_add_(0, cell_of, torch.ones_like(cell_of, dtype=torch.float64))
                now = time.monotonic()
                if now - logged > LOG_EVERY_S:
                    logged = now
                    left = timedelta(seconds=round((now - started) / done * (len(batches) - done)))
                    log(f"validation: {done} of {len(batches)} micro-batches, ETA {left}")
                beat()
        engine.set_training(True)
        totals = all_reduce(torch.stack([nats_CP, count_CP]), self._mesh.replicas).cpu().view(2, corpora, ranges)
        (nats_P, count_P), (nats_C, count_C) = totals.sum(1), totals.sum(2)
        if not count_P.sum():
            raise DataError("validation.sequences: no token of these sequences counts in the loss; raise it")
        names = map(str, self._batches.folders)
        by_corpus = {"loss_by_corpus": dict(zip(names, _means(nats_C, count_C), strict=True))} if corpora > 1 else {}
        return {
            "loss": float(nats_P.sum() / count_P.sum()),
            "position_ends": self.position_ends,
            "loss_by_position": _means(nats_P, count_P),
            **by_corpus,
            "tokens": int(count_P.sum()),
        }

    def _losses(self, engine: Engine, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Nats [B, T] of this rank's tokens, their positions in their documents and their samples among those of the
        micro-batch, each [B, T], [B, 1] or [1, T]."""
        nats_BT = engine(
            batch.tokens, labels=batch.labels, cu_seqlens=batch.cu_seqlens, label_count=1.0, tiling=self._tiling
        ).nats
        assert nats_BT is not None
        column_T, device = torch.cat([torch.arange(*tile.columns) for tile in self._tiling.tiles]), self._mesh.device
        if batch.cu_seqlens is None:
            return nats_BT, column_T[None].to(device), torch.arange(len(nats_BT), device=device)[:, None]
        starts = batch.cu_seqlens.cpu()
        position_T = column_T - starts[torch.bucketize(column_T, starts, right=True) - 1]
        return nats_BT, position_T[None].to(device), (column_T // self._seq_len)[None].to(device)


def _means(totals: Tensor, counts: Tensor) -> list[float | None]:
    """None where nothing is counted."""
    return [total / count if count else None for total, count in zip(totals.tolist(), counts.tolist(), strict=True)]
