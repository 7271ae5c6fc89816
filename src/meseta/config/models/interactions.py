"""Sections of models with explicit feature interactions, published since 2020."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from meseta.config.models.base import LayeredModelConfig
from meseta.config.section import Depth, Width

Structure = Literal["stacked", "parallel"]
CrossKind = Literal["full", "low_rank", "mixture"]
Activation = Literal["tanh", "relu"]
MaskStructure = Literal["serial", "parallel"]
Residual = Literal["concat", "sum"]
Interaction = Literal["self_attention", "cross", "dot", "linear", "convolution"]
Ensemble = Literal["concat", "sum", "weighted"]


class DCNv2Config(LayeredModelConfig):
    """DCN-V2, cross layers and a stacked or parallel MLP (arXiv 2008.13535)."""

    small_sizes: ClassVar = {"cross_layers": 2, "cross_low_rank": 16, "deep_mlp": [128, 64]}
    name: Literal["dcnv2"] = "dcnv2"
    structure: Structure = "stacked"
    """`stacked` runs the MLP on the output of the cross network. `parallel` runs both on the input."""
    cross: CrossKind = "full"
    """Matrices of cross layers: full rank, low rank, or a mixture of low-rank experts."""
    cross_layers: Depth = 3
    """Number of cross layers."""
    cross_low_rank: Width = 64
    """Rank of each matrix, for cross 'low_rank' and 'mixture'."""
    cross_experts: Depth = 4
    """Number of experts per layer, for cross 'mixture'."""
    cross_activation: Activation = "tanh"
    """Activation between the matrices of an expert, for cross 'mixture'."""
    deep_mlp: tuple[Width, ...] = (512, 256)
    """Widths of the hidden layers of the MLP. A 'stacked' MLP may be empty, and gets a last layer with one output."""


class GDCNConfig(LayeredModelConfig):
    """GDCN, gated cross layers and a stacked or parallel MLP (arXiv 2311.04635)."""

    small_sizes: ClassVar = {"cross_layers": 2, "deep_mlp": [128, 64]}
    name: Literal["gdcn"] = "gdcn"
    structure: Structure = "parallel"
    """`stacked` (GDCN-S) runs the MLP on the output of the cross network, `parallel` (GDCN-P) on the input."""
    cross_layers: Depth = 3
    """Number of gated cross layers."""
    deep_mlp: tuple[Width, ...] = (400, 400, 400)
    """Widths of the hidden layers of the MLP. A 'stacked' MLP may be empty, and gets a last layer with one output."""


class MaskNetConfig(LayeredModelConfig):
    """MaskNet, hidden layers with instance-guided masks on their inputs (arXiv 2102.07619)."""

    small_sizes: ClassVar = {"mask_blocks": [64, 64], "deep_mlp": [64]}
    name: Literal["masknet"] = "masknet"
    structure: MaskStructure = "parallel"
    """`serial` stacks the MaskBlocks. `parallel` runs all of them on the input, followed by an MLP."""
    mask_blocks: tuple[Width, ...] = Field(default=(64, 64, 64), min_length=1)
    """Number of outputs of each MaskBlock."""
    mask_reduction: float = Field(default=2.0, gt=0, le=64)
    """Width of a mask's hidden layer, relative to the width of the mask."""
    embedding_layer_norm: bool = True
    """Whether layer normalization of each vector precedes the masks."""
    deep_mlp: tuple[Width, ...] = (400, 400, 400)
    """Widths of the hidden layers of the MLP after the blocks, for structure 'parallel'. A last layer with one output
    is appended. Empty for 'serial'."""


class FinalMLPConfig(LayeredModelConfig):
    """FinalMLP, two MLPs with separately gated inputs, fused by products of their outputs (arXiv 2304.00902)."""

    small_sizes: ClassVar = {"first_mlp": [64], "second_mlp": [64], "gate_mlp": [32]}
    name: Literal["finalmlp"] = "finalmlp"
    first_mlp: tuple[Width, ...] = Field(default=(400, 400, 400), min_length=1)
    """Widths of the layers of the first stream."""
    second_mlp: tuple[Width, ...] = Field(default=(400, 400, 400), min_length=1)
    """Widths of the layers of the second stream."""
    first_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout rate of the first stream; None: `dropout`."""
    second_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout rate of the second stream; None: `dropout`."""
    feature_gates: bool = True
    """Whether each stream has a gate that weights its inputs."""
    gate_mlp: tuple[Width, ...] = (64,)
    """Widths of the hidden layers of the MLP of each gate."""
    first_context: tuple[str, ...] = ()
    """Input features of the first stream's gate; empty: the gate is the same for all samples."""
    second_context: tuple[str, ...] = ()
    """Input features of the second stream's gate; empty: the gate is the same for all samples."""
    fusion_heads: Depth = 1
    """Number of heads of the product of both outputs. It must divide the widths of both last layers."""


class FinalNetConfig(LayeredModelConfig):
    """FinalNet, layers that multiply two linear functions of their inputs (Zhu et al., SIGIR 2023)."""

    small_sizes: ClassVar = {"first_block": [64, 32], "second_block": [64, 32]}
    name: Literal["final"] = "final"
    first_block: tuple[Width, ...] = Field(default=(400, 400), min_length=1)
    """Widths of the layers of the first block. They must be even unless residual is 'sum'."""
    second_block: tuple[Width, ...] = (400, 400)
    """Widths of the layers of the second block; empty: a single block."""
    residual: Residual = "concat"
    """Combination of a layer's linear function and its product: concatenated halves, or their sum."""
    block_relu: bool = True
    """Whether each layer of a block ends with ReLU."""
    field_gate: bool = True
    """Whether the first block reads gated fields in addition to the fields."""
    mutual_loss: bool = True
    """Whether each of two blocks also learns from the joint prediction of both."""


class _VectorLayers(LayeredModelConfig):
    bottom_mlp: tuple[Width, ...] = (256,)
    """Widths of the hidden layers of the bottom MLP, which maps all dense inputs to one vector. A last layer is
    appended."""
    top_mlp: tuple[Width, ...] = (256, 128)
    """Widths of the hidden layers of the top MLP. A last layer with one output is appended."""


class WukongConfig(_VectorLayers):
    """Wukong, stacked layers of factorization machines and linear compression (arXiv 2403.02545)."""

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
    """Number of output vectors of a layer's factorization machine, n_F of the paper."""
    linear_vectors: Width = 16
    """Number of output vectors of a layer's linear compression, n_L of the paper."""
    fm_rank: Width = 24
    """Number of columns of the factorization machine's projection, k of the paper."""
    fm_mlp: tuple[Width, ...] = (256,)
    """Widths of the hidden layers of the factorization machine's MLP."""


class DHENConfig(_VectorLayers):
    """DHEN, layers that are ensembles of several kinds of interactions (arXiv 2203.11014)."""

    small_sizes: ClassVar = {"bottom_mlp": [32], "interactions": {"dot": 8, "linear": 8}, "top_mlp": [64]}
    name: Literal["dhen"] = "dhen"
    layers: Depth = 2
    """Number of layers."""
    interactions: dict[Interaction, Width] = Field(default={"dot": 16, "linear": 16}, min_length=1)
    """Modules of each layer with their numbers of output vectors: self_attention, cross, dot, linear, convolution."""
    ensemble: Ensemble = "concat"
    """Combination of the vectors of all modules: concatenation, sum, or sum with learned weights."""
    attention_heads: Depth = 2
    """Number of heads for interaction 'self_attention'. It must divide embedding_dim."""
    convolution_channels: Depth = 4
    """Number of output channels for interaction 'convolution'."""
