"""Jagged tensors: several ids per sample and feature, and the dense tensors that come back."""

from meseta.jagged.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from meseta.jagged.keyed_tensor import Embeddings, KeyedTensor

__all__ = ["Embeddings", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
