"""Training of recommendation models whose embedding tables are larger than one device."""

import importlib

# Public names are imported when first used (PEP 562), so that `import meseta` is fast and does not need torch.

_LAZY_IMPORTS = {
    "TableSpec": "meseta.spec",
    "Communication": "meseta.spec",
    "FeatureSpec": "meseta.spec",
    "InitSpec": "meseta.spec",
    "OptimizerSpec": "meseta.spec",
    "Plan": "meseta.spec",
    "Shard": "meseta.spec",
    "ShardingType": "meseta.spec",
    "Topology": "meseta.spec",
    "Workload": "meseta.spec",
    "FeatureLoad": "meseta.spec",
    "make_plan": "meseta.planner",
    "JaggedTensor": "meseta.sparse",
    "KeyedJaggedTensor": "meseta.sparse",
    "EmbeddingBagCollection": "meseta.embedding",
    "shard": "meseta.embedding",
    "ahead": "meseta.pipeline",
    "Callback": "meseta.api",
    "fit": "meseta.api",
    "open_run": "meseta.api",
    "Run": "meseta.api",
}

__all__ = [*_LAZY_IMPORTS, "__version__"]  # noqa: PLE0604
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(
            f"module 'meseta' has no attribute {name!r}; available: {', '.join(sorted(_LAZY_IMPORTS))}"
        )
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
