"""Jagged tensors for ids, and dense tensors for their embeddings."""

from meseta.jagged.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from meseta.jagged.keyed_tensor import Embeddings, KeyedTensor

__all__ = ["Embeddings", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
