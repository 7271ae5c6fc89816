"""Jagged tensors for ids, and dense tensors for their embeddings."""

from meseta.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from meseta.sparse.keyed_tensor import Embeddings, KeyedTensor

__all__ = ["Embeddings", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
