"""SHA-256 checksums of logical content. They do not depend on the plan or the number of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CHUNK_CHARS = 1 << 20


def hash_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Hash the little-endian bytes of C-ordered arrays, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def hash_json(document: object) -> str:
    """Hash a document as JSON in UTF-8 with sorted keys and without spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    digest = hashlib.sha256()
    for start in range(0, len(text), _CHUNK_CHARS):  # Encoding a long manifest completely would double its memory.
        digest.update(text[start : start + _CHUNK_CHARS].encode())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors by name: for each, the digest of [name, dtype, shape] as JSON, then its bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        head = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(hash_json(head).encode())
        if tensor.numel():  # An empty tensor may lack the stride that `view` requires.
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


TABLE_SHAPE_KEYS = ("num_embeddings", "embedding_dim", "dtype", "columns", "block_rows")
"""Keys of a table's manifest entry that determine the layout of its blocks."""


def hash_table(entry: Mapping[str, Any]) -> str:
    """Hash a table's manifest entry: its layout and the checksums of its blocks."""
    # Optimizer constants are left out, because they affect later training but not the stored rows.
    head = {name: entry[name] for name in TABLE_SHAPE_KEYS}
    return hash_json({**head, "blocks": [block["checksum"] for block in entry["blocks"]]})


def hash_chain(entry: Mapping[str, Any]) -> str:
    """Hash the manifest entry of a table with several files per block.

    The digest covers its layout, and for each file the first row of its block, its number of rows and its checksum.
    """
    head = {name: entry[name] for name in TABLE_SHAPE_KEYS}
    files = [[file["first_row"], file["num_rows"], file["checksum"]] for file in entry["blocks"]]
    return hash_json({**head, "files": files})


def content_digest(entry: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest or table entry, or the digest of its chain if the entry has no checksum.

    Equal digests mean equal content. Different digests may still mean equal content.
    """
    return str(entry["checksum"] if entry.get("checksum") is not None else entry["chain"])


def hash_model(manifest: Mapping[str, Any]) -> str:
    """Hash the tables and dense tensors of a model. Step, plan and trainer state have no effect."""
    tables = {name: content_digest(entry) for name, entry in manifest["tables"].items()}
    return hash_json({"tables": tables, "dense": manifest["dense"]["checksum"]})


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Hash a manifest without the key that stores this hash."""
    return hash_json({key: value for key, value in manifest.items() if key != "manifest_checksum"})
