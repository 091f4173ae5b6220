"""Chunks of documents, and where their index tensors lie in memory."""

import pytest
import torch
from fla_core import fla_core
from torch import Tensor

from tost_lm.ops.layout import FLA_CHUNK_TOKENS, document_layout, fla_documents


def test_a_chunk_never_crosses_a_document():
    layout = document_layout((0, 5, 9, 10), 4, torch.device("cpu"))
    assert layout.start_K.tolist() == [0, 4, 5, 9]
    assert layout.end_K.tolist() == [4, 5, 9, 10]
    assert layout.document_K.tolist() == [0, 0, 1, 2]
    assert layout.first_chunk_N1.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("offsets", [(0, 3), (0, 8), (0, 5, 9), (0, 1, 2, 3), (0, 4, 9, 10)])
def test_triton_compiles_nothing_again_for_other_documents(offsets: tuple[int, ...]):
    tensors = [x for x in vars(document_layout(offsets, 4, torch.device("cpu"))).values() if isinstance(x, Tensor)]
    assert len(tensors) == 4
    assert [x.data_ptr() % 16 for x in tensors] == [0] * 4


def test_documents_for_fla_have_the_chunks_that_it_would_copy():
    index = fla_core("fla.ops.utils.index")
    offsets = (0, 1, 3, 70, 200, 264)
    found = fla_documents(offsets, torch.device("cpu"))
    assert found["cu_seqlens"].tolist() == list(offsets)
    assert torch.equal(found["chunk_indices"], index.prepare_chunk_indices(torch.tensor(offsets), FLA_CHUNK_TOKENS))
