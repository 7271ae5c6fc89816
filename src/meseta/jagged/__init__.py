"""Jagged tensors: several ids per sample and feature, and the dense tensors that come back."""

from meseta.jagged.jagged import JaggedTensor, KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor"]
