"""The section `model` of a run's config: what is trained."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from meseta.config.section import Depth, Section, Width
from meseta.spec import nearest

MODEL_NAMES = ("dlrm", "dlrm_dcnv2", "logistic_regression", "fm", "wide_deep", "deepfm", "xdeepfm", "autoint", "mmoe")
"""Models of this package."""
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""'package.module:Class', a model of the user's own."""


class ModelConfig(Section):
    name: str = "dlrm"
    """'dlrm' (arXiv 1906.00091), 'dlrm_dcnv2' (low-rank cross, arXiv 2008.13535), 'logistic_regression' (the linear
    baseline), 'fm' (Rendle, ICDM 2010), 'wide_deep' (arXiv 1606.07792), 'deepfm' (arXiv 1703.04247), 'xdeepfm' (arXiv
    1803.05170), 'autoint' (arXiv 1810.11921), or 'mmoe' for several labels (Ma et al., KDD 2018); or
    'package.module:Class', a model of your own."""
    options: dict[str, Any] = Field(default={})
    """An own model: keyword arguments of its constructor."""
    embedding_dim: Width = 16
    """All but logistic_regression: columns of every table; fm, deepfm, xdeepfm and wide_deep have one more, the weight
    of the id by itself, which is all that logistic_regression has."""
    bottom_mlp: tuple[Width, ...] = (512, 256, 64)
    """dlrm, dlrm_dcnv2: hidden widths of the bottom MLP; its last layer has embedding_dim outputs and is added."""
    top_mlp: tuple[Width, ...] = (512, 256)
    """dlrm, dlrm_dcnv2: hidden widths of the top MLP; the single output is added."""
    interaction: Literal["dot", "none"] = "dot"
    """dlrm: pairwise dot products of embeddings, or none (embeddings are only concatenated)."""
    cross_layers: Depth = 3
    """dlrm_dcnv2: number of low-rank cross layers."""
    cross_low_rank: Width = 512
    """dlrm_dcnv2: rank of each cross layer's matrix."""
    deep_mlp: tuple[Width, ...] = (512, 256)
    """wide_deep, deepfm, xdeepfm, autoint: hidden widths of the MLP beside the rest; the single output is added.
    autoint: empty for none."""
    cin_layers: tuple[Width, ...] = Field(default=(64, 64), min_length=1)
    """xdeepfm: rows of each layer of the compressed interaction network."""
    attention_layers: Depth = 3
    """autoint: number of interacting layers."""
    attention_heads: Depth = 2
    """autoint: heads of each layer."""
    attention_dim: Width = 32
    """autoint: columns of each head."""
    num_experts: Depth = 8
    """mmoe: experts that all tasks share."""
    expert_mlp: tuple[Width, ...] = Field(default=(512, 256), min_length=1)
    """mmoe: widths of each expert's layers."""
    tower_mlp: tuple[Width, ...] = (128,)
    """mmoe: hidden widths of each task's tower; the single output is added."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """All but logistic_regression and fm: share of the outputs of hidden layers that is dropped in training; masks do
    not depend on the number of ranks."""
    batch_norm: bool = False
    """All but logistic_regression and fm: normalise the outputs of hidden layers before ReLU, with statistics of the
    global batch."""

    @field_validator("name")
    @classmethod
    def _known_or_own(cls, name: str) -> str:
        if name not in MODEL_NAMES and not IMPORT_PATH.fullmatch(name):
            raise ValueError(
                f"no model {name!r}; {nearest(name, MODEL_NAMES)}, or give your own as 'package.module:Class'"
            )
        return name

    @model_validator(mode="after")
    def _options_are_of_own_models(self) -> ModelConfig:
        if self.options and self.name in MODEL_NAMES:
            raise ValueError(
                f"'options' are for a model of your own, named as 'package.module:Class'; {self.name!r} has keys of "
                "its own here"
            )
        return self
