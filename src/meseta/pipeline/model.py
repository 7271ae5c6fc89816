"""Interface of a model in a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from meseta.embedding.base import BaseEmbeddingCollection
from meseta.sparse.shapes import Float


@runtime_checkable  # Required by beartype, with which tests check all calls.
class Model(Protocol):
    """Model with embeddings, and a dense part that computes logits from them.

    An optional method `forward_dense(dense)` runs while embeddings are exchanged. `score` then receives its result in
    place of the dense inputs, but must accept dense inputs too. If the attribute `reads_embeddings` is true, `score`
    receives `Embeddings` in place of pooled embeddings.
    """

    # Modules provide submodules by __getattr__, which runtime checks ignore since Python 3.12.
    if TYPE_CHECKING:
        embeddings: BaseEmbeddingCollection[Any]

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Compute logits, of shape [B], or [B, T] for T > 1 tasks."""
