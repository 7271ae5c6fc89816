"""What a training step needs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from meseta.embedding.base import BaseEmbeddingCollection
from meseta.jagged.shapes import Float


@runtime_checkable  # beartype asks for it where the tests check every call
class Model(Protocol):
    """Tables that are looked up first, and a dense part that scores.

    It may have a method `forward_dense(dense)` too: what needs dense inputs alone, which is computed while embeddings
    travel. `score` then gets what that returns in place of the dense inputs, and takes these themselves as well. With
    an attribute `reads_embeddings` that is true, `score` gets Embeddings in place of pooled vectors.
    """

    if TYPE_CHECKING:  # a module answers for its parts by __getattr__, which checks at runtime pass by from 3.12 on
        embeddings: BaseEmbeddingCollection[Any]

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Logits from dense inputs and pooled embeddings: [B], or [B, T] for T > 1 tasks."""
