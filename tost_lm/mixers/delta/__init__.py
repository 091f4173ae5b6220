"""Gated DeltaNet (arXiv 2412.06464): a layer whose state is corrected by each token. Linear time, constant state.

Each head has a state, a matrix that maps keys to values. A token lets it decay and moves what it returns for the
token's key towards the token's value:

    S_t = (I − β_t k_t k_tᵀ) α_t S_{t−1} + β_t k_t v_tᵀ        y_t = S_tᵀ q_t

α_t is a number, or with a decay for each channel of the keys a diagonal matrix. Keys have length 1. With β = 1 the
state then returns v_t for k_t; with β = 2 the sign of what it returned is reversed.

Shapes: B sequences, T tokens, C channels of the model; h key heads with keys of size K, H value heads (a multiple of h)
with values of size V; N documents (N = B unless packed). Value heads i·H/h to (i + 1)·H/h − 1 use key head i.
"""
