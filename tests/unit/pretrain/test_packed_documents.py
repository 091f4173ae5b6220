"""The loss of packed documents, as the loader packs them, is that of each document read alone."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hand_made import EOT, hand_made

from tost_lm.config import validate
from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import prefetched
from tost_lm.model import ModelConfig, TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.testing import assert_close

pytestmark = pytest.mark.quick

VOCAB, T, MICRO_BATCH = 50, 16, 3


def test_a_packed_document_costs_what_it_costs_alone(tmp_path: Path):
    torch.manual_seed(0)
    tree = {"pattern": "TA", "layers": 2, "heads": 2, "width": 16, "vocab_size": VOCAB, "max_positions": T}
    model = TostLM(validate(ModelConfig, {**tree, "layer_scale": 1.0}, "test")).double()
    corpora = Corpora([hand_made(tmp_path, [1 + 7 * i % 15 for i in range(40)], vocab_size=VOCAB)], [1.0])
    batches = TrainingBatches(
        corpora, BatchShard(0, 1, ((0, MICRO_BATCH * T),)), packing="best-fit", seed=0, seq_len=T,
        global_batch_size=2 * MICRO_BATCH, micro_batch_size=MICRO_BATCH, ignored_label=IGNORED_LABEL,
    )  # fmt: skip
    documents = 0
    with prefetched(batches, range(3), 0, torch.device("cpu")) as steps, torch.no_grad():
        for tokens, labels, cu_seqlens in (batch for _, batches in steps for batch in batches):
            assert cu_seqlens is not None
            packed = model(tokens, labels=labels, cu_seqlens=cu_seqlens, label_count=1.0).loss
            alone = torch.zeros((), dtype=torch.float64)
            for start, end in pairwise(cu_seqlens.tolist()):
                document = labels[0, start:end]
                if document[0] == IGNORED_LABEL:
                    continue
                whole = torch.cat([tokens[0, start : start + 1], document])
                alone += model(whole[None, :-1], labels=whole[None, 1:], label_count=1.0).loss
                documents += bool(whole[0] == EOT and document[-1] == EOT)  # the others were cut
            assert_close(packed, alone, 1e-12)
    assert documents > 20
