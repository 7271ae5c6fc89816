"""Recommendation models, from logistic regression to DHEN, and MMoE for several labels."""

from meseta.models.interactions.deep_cross import GDCN, CrossShape, DCNv2
from meseta.models.interactions.dhen import DHEN, DHENShape
from meseta.models.interactions.final import FinalNet, FinalShape
from meseta.models.interactions.finalmlp import FinalMLP, StreamShape
from meseta.models.interactions.masknet import MaskNet, MaskShape
from meseta.models.interactions.wukong import Wukong, WukongShape
from meseta.models.layers import MLP, MLPOptions, fill_glorot
from meseta.models.ranking.autoint import AutoInt
from meseta.models.ranking.dlrm import DLRM
from meseta.models.ranking.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.ranking.fm import FM, DeepFM
from meseta.models.ranking.linear import LogisticRegression, WideDeep
from meseta.models.ranking.mmoe import MMoE
from meseta.models.ranking.xdeepfm import XDeepFM
from meseta.models.registry import make_model

__all__ = [
    "DHEN",
    "DLRM",
    "FM",
    "GDCN",
    "MLP",
    "AutoInt",
    "CrossShape",
    "DCNv2",
    "DHENShape",
    "DLRMDCNv2",
    "DeepFM",
    "FinalMLP",
    "FinalNet",
    "FinalShape",
    "LogisticRegression",
    "MLPOptions",
    "MMoE",
    "MaskNet",
    "MaskShape",
    "StreamShape",
    "WideDeep",
    "Wukong",
    "WukongShape",
    "XDeepFM",
    "fill_glorot",
    "make_model",
]
