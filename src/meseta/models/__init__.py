"""Recommendation models: from the linear baseline to DLRM, and MMoE for several labels."""

from meseta.config.widths import wanted_embedding_dim
from meseta.models.autoint import AutoInt
from meseta.models.dlrm import DLRM
from meseta.models.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.factory import make_model
from meseta.models.fm import FM, DeepFM
from meseta.models.layers import MLP, MLPOptions, fill_glorot
from meseta.models.logistic_regression import LogisticRegression
from meseta.models.mmoe import MMoE
from meseta.models.wide_deep import WideDeep
from meseta.models.xdeepfm import XDeepFM

__all__ = [
    "DLRM",
    "FM",
    "MLP",
    "AutoInt",
    "DLRMDCNv2",
    "DeepFM",
    "LogisticRegression",
    "MLPOptions",
    "MMoE",
    "WideDeep",
    "XDeepFM",
    "fill_glorot",
    "make_model",
    "wanted_embedding_dim",
]
