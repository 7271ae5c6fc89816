"""Sections of the models that lead published comparisons of interactions since 2020, and of DHEN."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from meseta.config.models.base import LayeredModelConfig
from meseta.config.section import Depth, Width

Structure = Literal["stacked", "parallel"]
"""An MLP on a cross network, or beside it."""
CrossKind = Literal["full", "low_rank", "mixture"]
Activation = Literal["tanh", "relu"]
MaskStructure = Literal["serial", "parallel"]
Residual = Literal["concat", "sum"]
Interaction = Literal["self_attention", "cross", "dot", "linear", "convolution"]
Ensemble = Literal["concat", "sum", "weighted"]


class DCNv2Config(LayeredModelConfig):
    """Cross layers, and an MLP on them or beside them (DCN-V2, arXiv 2008.13535)."""

    small_sizes: ClassVar = {"cross_layers": 2, "cross_low_rank": 16, "deep_mlp": [128, 64]}
    name: Literal["dcnv2"] = "dcnv2"
    structure: Structure = "stacked"
    """The MLP on the cross network, or beside it."""
    cross: CrossKind = "full"
    """Matrices of the cross layers: of full rank, of low rank, or mixtures of experts of low rank."""
    cross_layers: Depth = 3
    """Number of cross layers."""
    cross_low_rank: Width = 64
    """Of cross 'low_rank' and 'mixture': rank of each matrix."""
    cross_experts: Depth = 4
    """Of cross 'mixture': experts of each layer."""
    cross_activation: Activation = "tanh"
    """Of cross 'mixture': function between the matrices of an expert."""
    deep_mlp: tuple[Width, ...] = (512, 256)
    """Hidden widths of the MLP; stacked, the single output is added, and there may be none."""


class GDCNConfig(LayeredModelConfig):
    """Cross layers whose outputs pass a gate, and an MLP on them or beside them (GDCN, arXiv 2311.04635)."""

    small_sizes: ClassVar = {"cross_layers": 2, "deep_mlp": [128, 64]}
    name: Literal["gdcn"] = "gdcn"
    structure: Structure = "parallel"
    """The MLP on the cross network (GDCN-S), or beside it (GDCN-P)."""
    cross_layers: Depth = 3
    """Number of gated cross layers."""
    deep_mlp: tuple[Width, ...] = (400, 400, 400)
    """Hidden widths of the MLP; stacked, the single output is added, and there may be none."""


class MaskNetConfig(LayeredModelConfig):
    """Hidden layers whose inputs are multiplied by masks that the sample makes (MaskNet, arXiv 2102.07619)."""

    small_sizes: ClassVar = {"mask_blocks": [64, 64], "deep_mlp": [64]}
    name: Literal["masknet"] = "masknet"
    structure: MaskStructure = "parallel"
    """MaskBlocks one on the other, or side by side under an MLP."""
    mask_blocks: tuple[Width, ...] = Field(default=(64, 64, 64), min_length=1)
    """Outputs of each MaskBlock."""
    mask_reduction: float = Field(default=2.0, gt=0, le=64)
    """Width of a mask's inner layer over that of the mask."""
    deep_mlp: tuple[Width, ...] = (400, 400, 400)
    """Of structure 'parallel', and empty for 'serial': hidden widths of the MLP on the blocks; the single output is
    added."""


class FinalMLPConfig(LayeredModelConfig):
    """Two MLPs over differently weighed inputs, fused by products of their outputs (FinalMLP, arXiv 2304.00902)."""

    small_sizes: ClassVar = {"first_mlp": [64], "second_mlp": [64], "gate_mlp": [32]}
    name: Literal["finalmlp"] = "finalmlp"
    first_mlp: tuple[Width, ...] = Field(default=(400, 400, 400), min_length=1)
    """Widths of the layers of the first stream."""
    second_mlp: tuple[Width, ...] = Field(default=(400, 400, 400), min_length=1)
    """Widths of the layers of the second stream."""
    feature_gates: bool = True
    """Whether each stream weighs its inputs by a gate of its own."""
    gate_mlp: tuple[Width, ...] = (64,)
    """Hidden widths of the MLP of each gate."""
    first_context: tuple[str, ...] = ()
    """Features that the first stream's gate reads; empty: it is the same for all samples."""
    second_context: tuple[str, ...] = ()
    """Features that the second stream's gate reads; empty: it is the same for all samples."""
    fusion_heads: Depth = 1
    """Heads of the products of both outputs; divides the width of both last layers."""


class FinalNetConfig(LayeredModelConfig):
    """Layers that multiply two linear functions of their inputs (FinalNet, Zhu et al., SIGIR 2023)."""

    small_sizes: ClassVar = {"first_block": [64, 32], "second_block": [64, 32]}
    name: Literal["final"] = "final"
    first_block: tuple[Width, ...] = Field(default=(400, 400), min_length=1)
    """Widths of the layers of the first block; even ones, unless residual is 'sum'."""
    second_block: tuple[Width, ...] = (400, 400)
    """Widths of the layers of the second block; empty: there is one block."""
    residual: Residual = "concat"
    """How a layer's linear function and its product stand together: halves side by side, or added."""
    block_relu: bool = True
    """Whether each layer of a block ends with ReLU."""
    field_gate: bool = True
    """Whether the first block reads gated fields beside the fields."""
    mutual_loss: bool = True
    """Whether each of two blocks also learns what both say together."""


class _VectorLayers(LayeredModelConfig):
    bottom_mlp: tuple[Width, ...] = (256,)
    """Hidden widths of the bottom MLP, which makes one vector of all dense inputs; its last layer is added."""
    top_mlp: tuple[Width, ...] = (256, 128)
    """Hidden widths of the top MLP; the single output is added."""


class WukongConfig(_VectorLayers):
    """Stacked layers of factorization machines and linear compression (Wukong, arXiv 2403.02545)."""

    small_sizes: ClassVar = {
        "bottom_mlp": [32],
        "layers": 2,
        "fm_vectors": 8,
        "linear_vectors": 8,
        "fm_rank": 8,
        "fm_mlp": [64],
        "top_mlp": [64],
    }
    name: Literal["wukong"] = "wukong"
    layers: Depth = 3
    """Number of layers."""
    fm_vectors: Width = 16
    """Vectors that a layer's factorization machine makes, n_F of the paper."""
    linear_vectors: Width = 16
    """Vectors that a layer's linear compression makes, n_L of the paper."""
    fm_rank: Width = 24
    """Columns of the factorization machine's projection, k of the paper."""
    fm_mlp: tuple[Width, ...] = (256,)
    """Hidden widths of the MLP of the factorization machine."""


class DHENConfig(_VectorLayers):
    """Layers that are ensembles of interactions of several kinds (DHEN, arXiv 2203.11014)."""

    small_sizes: ClassVar = {"bottom_mlp": [32], "interactions": {"dot": 8, "linear": 8}, "top_mlp": [64]}
    name: Literal["dhen"] = "dhen"
    layers: Depth = 2
    """Number of layers."""
    interactions: dict[Interaction, Width] = Field(default={"dot": 16, "linear": 16}, min_length=1)
    """Modules of each layer, and how many vectors each makes: self_attention, cross, dot, linear, convolution."""
    ensemble: Ensemble = "concat"
    """Vectors of all modules one under the other, added, or added with learned weights."""
    attention_heads: Depth = 2
    """Of interaction 'self_attention': heads, which divide embedding_dim."""
    convolution_channels: Depth = 4
    """Of interaction 'convolution': channels that it makes."""
