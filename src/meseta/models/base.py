"""What a model of this package is: embeddings that are looked up first, and a dense part that scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Float
from meseta.models.layers import check_inputs, pooled_dims


class ScoringModel(nn.Module, ABC):
    """`forward` looks up and scores; a pipeline looks up by itself and calls `score`."""

    def __init__(self, embeddings: nn.Module, num_dense: int) -> None:
        """Hold `embeddings`, a module with `tables` and `features` whose call returns an object with `pooled.values`
        [B, sum of D_f].

        Raises MesetaError for a feature without pooling.
        """
        super().__init__()
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dims = pooled_dims(type(self).__name__, embeddings)
        self.pooled_width = sum(self.dims.values())

    def forward(self, dense: Float[Tensor, "B num_dense"], sparse: KeyedJaggedTensor) -> Float[Tensor, " B *T"]:
        """Logits of the click probability; dense inputs are cast to the type of the embeddings."""
        return self.score(dense, self.embeddings(sparse).pooled.values)

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Logits from embeddings that were looked up before: [B], or [B, T] where a model has several tasks.

        Raises MesetaError for inputs of other widths than the model was built for.
        """
        check_inputs(type(self).__name__, dense, pooled, self.num_dense, self.pooled_width)
        return self.logits(dense, pooled)

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Where the samples that were looked up last lie in the global batch, for dropout and batch norm."""
        return cast("BatchSlice | None", getattr(self.embeddings, "batch_slice", None))

    @abstractmethod
    def logits(
        self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, " B *T"]:
        """What `score` returns for inputs that it has checked."""
