"""Recommendation models: DLRM, DLRM-DCNv2 and the linear baseline."""

from meseta.models.dlrm import DLRM
from meseta.models.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.factory import make_model, wanted_embedding_dim
from meseta.models.logistic_regression import LogisticRegression

__all__ = ["DLRM", "DLRMDCNv2", "LogisticRegression", "make_model", "wanted_embedding_dim"]
