"""Sections of models published up to 2020."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from meseta.config.models.base import LayeredModelConfig, ModelConfig, VectorModelConfig
from meseta.config.section import Depth, Width


class _DLRMLayers(LayeredModelConfig):
    accepts_legacy_keys = True
    bottom_mlp: tuple[Width, ...] = (512, 256, 64)
    """Widths of the hidden layers of the bottom MLP. A last layer with embedding_dim outputs is appended."""
    top_mlp: tuple[Width, ...] = (512, 256)
    """Widths of the hidden layers of the top MLP. A last layer with one output is appended."""


class DLRMConfig(_DLRMLayers):
    """Deep learning recommendation model with dot products of all pairs (arXiv 1906.00091)."""

    small_sizes: ClassVar = {"bottom_mlp": [64], "top_mlp": [128, 64]}
    name: Literal["dlrm"] = "dlrm"
    interaction: Literal["dot", "none"] = "dot"
    """Interaction of embeddings: pairwise dot products, or only concatenation ('none')."""


class DLRMDCNv2Config(_DLRMLayers):
    """DLRM with a low-rank cross network in place of dot products (arXiv 2008.13535; MLPerf Training v4.0)."""

    small_sizes: ClassVar = {**DLRMConfig.small_sizes, "cross_layers": 2, "cross_low_rank": 32}
    name: Literal["dlrm_dcnv2"] = "dlrm_dcnv2"
    cross_layers: Depth = 3
    """Number of low-rank cross layers."""
    cross_low_rank: Width = 512
    """Rank of each cross layer's matrix."""


class LogisticRegressionConfig(ModelConfig):
    """Logistic regression with a weight per id and per dense input."""

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
    """Widths of the hidden layers of the parallel MLP. A last layer with one output is appended."""


class WideDeepConfig(_DeepLayers):
    """Wide & Deep, a linear part and an MLP (arXiv 1606.07792)."""

    weight_columns = 1
    name: Literal["wide_deep"] = "wide_deep"


class DeepFMConfig(_DeepLayers):
    """DeepFM, a factorization machine and an MLP on the same embeddings (arXiv 1703.04247)."""

    weight_columns = 1
    name: Literal["deepfm"] = "deepfm"


class XDeepFMConfig(_DeepLayers):
    """xDeepFM, a compressed interaction network, a linear part and an MLP (arXiv 1803.05170)."""

    small_sizes: ClassVar = {**_DeepLayers.small_sizes, "cin_layers": [16, 16]}
    weight_columns = 1
    name: Literal["xdeepfm"] = "xdeepfm"
    cin_layers: tuple[Width, ...] = Field(default=(64, 64), min_length=1)
    """Number of feature maps of each layer of the compressed interaction network."""


class AutoIntConfig(_DeepLayers):
    """AutoInt, self-attention between fields in several layers, and a parallel MLP (arXiv 1810.11921)."""

    small_sizes: ClassVar = {**_DeepLayers.small_sizes, "attention_layers": 2, "attention_dim": 8}
    name: Literal["autoint"] = "autoint"
    deep_mlp: tuple[Width, ...] = (512, 256)
    """Widths of the hidden layers of the parallel MLP. A last layer with one output is appended. Empty: no MLP."""
    attention_layers: Depth = 3
    """Number of interacting layers."""
    attention_heads: Depth = 2
    """Number of heads of each interacting layer."""
    attention_dim: Width = 32
    """Dimension of each head."""


class MMoEConfig(LayeredModelConfig):
    """Multi-gate mixture of experts for several labels (Ma et al., KDD 2018)."""

    accepts_legacy_keys = True
    small_sizes: ClassVar = {"num_experts": 4, "expert_mlp": [64, 32], "tower_mlp": [32]}
    name: Literal["mmoe"] = "mmoe"
    num_experts: Depth = 8
    """Number of experts, which all tasks share."""
    expert_mlp: tuple[Width, ...] = Field(default=(512, 256), min_length=1)
    """Widths of the layers of each expert."""
    tower_mlp: tuple[Width, ...] = (128,)
    """Widths of the hidden layers of each task's tower. A last layer with one output is appended."""
