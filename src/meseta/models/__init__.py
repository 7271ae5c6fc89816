"""Recommendation models: from the linear baseline to DLRM, and MMoE for several labels."""

from meseta.models.factory import make_model
from meseta.models.layers import MLP, MLPOptions, fill_glorot
from meseta.models.ranking.autoint import AutoInt
from meseta.models.ranking.dlrm import DLRM
from meseta.models.ranking.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.ranking.fm import FM, DeepFM
from meseta.models.ranking.logistic_regression import LogisticRegression
from meseta.models.ranking.mmoe import MMoE
from meseta.models.ranking.wide_deep import WideDeep
from meseta.models.ranking.xdeepfm import XDeepFM

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
]
