"""Chunks of documents, and where their index tensors lie in memory."""

import pytest
import torch
from torch import Tensor

from tost_lm.ops.layout import document_layout


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
