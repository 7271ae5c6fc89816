"""Sections of the models that were published up to 2020."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from meseta.config.models.base import LayeredModelConfig, ModelConfig, VectorModelConfig
from meseta.config.section import Depth, Width


class _DLRMLayers(LayeredModelConfig):
    accepts_legacy_keys = True
    bottom_mlp: tuple[Width, ...] = (512, 256, 64)
    """Hidden widths of the bottom MLP; its last layer has embedding_dim outputs and is added."""
    top_mlp: tuple[Width, ...] = (512, 256)
    """Hidden widths of the top MLP; the single output is added."""


class DLRMConfig(_DLRMLayers):
    """Deep learning recommendation model: dot products of all pairs (arXiv 1906.00091)."""

    small_sizes: ClassVar = {"bottom_mlp": [64], "top_mlp": [128, 64]}
    name: Literal["dlrm"] = "dlrm"
    interaction: Literal["dot", "none"] = "dot"
    """Pairwise dot products of embeddings, or none (embeddings are only concatenated)."""


class DLRMDCNv2Config(_DLRMLayers):
    """DLRM with a low-rank cross network in place of dot products (arXiv 2008.13535; MLPerf Training v4.0)."""

    small_sizes: ClassVar = {**DLRMConfig.small_sizes, "cross_layers": 2, "cross_low_rank": 32}
    name: Literal["dlrm_dcnv2"] = "dlrm_dcnv2"
    cross_layers: Depth = 3
    """Number of low-rank cross layers."""
    cross_low_rank: Width = 512
    """Rank of each cross layer's matrix."""


class LogisticRegressionConfig(ModelConfig):
    """The linear baseline: a weight per id and per dense input."""

    accepts_legacy_keys = True
    weight_columns = 1
    name: Literal["logistic_regression"] = "logistic_regression"


class FMConfig(VectorModelConfig):
    """Factorization machine of degree 2 (Rendle, ICDM 2010)."""

    accepts_legacy_keys = True
    weight_columns = 1
    name: Literal["fm"] = "fm"


class _DeepLayers(LayeredModelConfig):
    accepts_legacy_keys = True
    small_sizes: ClassVar = {"deep_mlp": [128, 64]}
    deep_mlp: tuple[Width, ...] = (512, 256)
    """Hidden widths of the MLP beside the rest; the single output is added."""


class WideDeepConfig(_DeepLayers):
    """Wide & Deep: a linear part and an MLP (arXiv 1606.07792)."""

    weight_columns = 1
    name: Literal["wide_deep"] = "wide_deep"


class DeepFMConfig(_DeepLayers):
    """A factorization machine and an MLP on the same vectors (arXiv 1703.04247)."""

    weight_columns = 1
    name: Literal["deepfm"] = "deepfm"


class XDeepFMConfig(_DeepLayers):
    """A compressed interaction network, a linear part and an MLP (arXiv 1803.05170)."""

    small_sizes: ClassVar = {**_DeepLayers.small_sizes, "cin_layers": [16, 16]}
    weight_columns = 1
    name: Literal["xdeepfm"] = "xdeepfm"
    cin_layers: tuple[Width, ...] = Field(default=(64, 64), min_length=1)
    """Rows of each layer of the compressed interaction network."""


class AutoIntConfig(_DeepLayers):
    """Fields attend to each other in several layers, with an MLP beside (arXiv 1810.11921)."""

    small_sizes: ClassVar = {**_DeepLayers.small_sizes, "attention_layers": 2, "attention_dim": 8}
    name: Literal["autoint"] = "autoint"
    deep_mlp: tuple[Width, ...] = (512, 256)
    """Hidden widths of the MLP beside the rest; the single output is added. Empty for none."""
    attention_layers: Depth = 3
    """Number of interacting layers."""
    attention_heads: Depth = 2
    """Heads of each layer."""
    attention_dim: Width = 32
    """Columns of each head."""


class MMoEConfig(LayeredModelConfig):
    """Multi-gate mixture of experts, for several labels (Ma et al., KDD 2018)."""

    accepts_legacy_keys = True
    small_sizes: ClassVar = {"num_experts": 4, "expert_mlp": [64, 32], "tower_mlp": [32]}
    name: Literal["mmoe"] = "mmoe"
    num_experts: Depth = 8
    """Experts that all tasks share."""
    expert_mlp: tuple[Width, ...] = Field(default=(512, 256), min_length=1)
    """Widths of each expert's layers."""
    tower_mlp: tuple[Width, ...] = (128,)
    """Hidden widths of each task's tower; the single output is added."""
