"""Specifications of tables, features, machines and workloads, and sharding plans. Does not import torch."""

from meseta.errors import MesetaError, suggest
from meseta.spec.codecs import Communication
from meseta.spec.cost_model import CostModel
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.plan import Plan
from meseta.spec.shards import COLUMN_BLOCK, Shard, ShardingType, TablePlan
from meseta.spec.tables import (
    FeatureSpec,
    IdPolicy,
    InitSpec,
    Pooling,
    TableSpec,
    check_features,
)
from meseta.spec.tiers import StorageOptions, Tier
from meseta.spec.topology import DeviceKind, Link, Topology
from meseta.spec.workload import DenseLoad, FeatureLoad, Reuse, Workload

__all__ = [
    "COLUMN_BLOCK",
    "Communication",
    "CostModel",
    "DenseLoad",
    "DeviceKind",
    "FeatureLoad",
    "FeatureSpec",
    "IdPolicy",
    "InitSpec",
    "Link",
    "MesetaError",
    "OptimizerSpec",
    "Plan",
    "Pooling",
    "Reuse",
    "Shard",
    "ShardingType",
    "StorageOptions",
    "TablePlan",
    "TableSpec",
    "Tier",
    "Topology",
    "Workload",
    "check_features",
    "suggest",
]
