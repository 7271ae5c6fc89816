"""What the user says (tables, features, machines) and what the planner decided (shards, plans). No torch here."""

from meseta.spec.errors import MesetaError, nearest
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.plan import COLUMN_BLOCK, Plan, Shard, ShardingType, TablePlan
from meseta.spec.tables import (
    FeatureSpec,
    IdPolicy,
    InitSpec,
    Pooling,
    TableSpec,
    check_features,
)
from meseta.spec.topology import Topology

__all__ = [
    "COLUMN_BLOCK",
    "FeatureSpec",
    "IdPolicy",
    "InitSpec",
    "MesetaError",
    "OptimizerSpec",
    "Plan",
    "Pooling",
    "Shard",
    "ShardingType",
    "TablePlan",
    "TableSpec",
    "Topology",
    "check_features",
    "nearest",
]
