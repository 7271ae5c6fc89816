"""Collections of embedding tables, in one process or sharded over ranks."""

from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.sharded import ShardedEmbeddingBagCollection
from meseta.embedding.sharding import resolve_plan, shard

__all__ = ["EmbeddingBagCollection", "ShardedEmbeddingBagCollection", "resolve_plan", "shard"]
