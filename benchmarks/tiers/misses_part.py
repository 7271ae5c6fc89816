"""Cache misses compared with exact LRU, LFU and Belady on the same ids."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from record import record

from meseta.data.synth import CARDINALITIES
from meseta.measure.synthetic_batches import permute_rows, zipf_ids
from meseta.ops.row_cache import RowCache, memory_backing_store, pin_rows

Ids = NDArray[np.int64]
Score = Callable[[NDArray[np.float64], Ids, int], None]
"""Function of (scores of all rows, rows of a batch, index of the batch) that updates scores. The lowest score is
evicted."""
BATCH_SIZE, NEAR_SHARE = 2048, 0.1
SCALE = 16
"""Divisor of Criteo's tables, so that the cache fills early."""
LIMITS = {"still": 0.85, "moving": 1.05, "replaced": 1.05}
"""Maximum misses, relative to LRU if popular rows are constant, else to the better of LRU and LFU."""


def batches_of(kind: str, num_rows: int, num_batches: int) -> list[Ids]:
    """Return Zipf ids. Popular rows are constant, change gradually (a fifth in total), or are replaced nine times."""
    random, batches = np.random.default_rng(3), []
    for number in range(num_batches):
        share = {"still": 0.0, "moving": 0.2 * number / num_batches, "replaced": number * 10 // num_batches / 10}[kind]
        shift = permute_rows(np.array([int(share * num_rows)]), num_rows)
        batches.append((zipf_ids(random, BATCH_SIZE, num_rows) + shift) % num_rows)
    return batches


def near_misses(batches: list[Ids], num_rows: int) -> int:
    """Return the misses of our cache. The first access of a row is not a miss."""
    store = memory_backing_store(torch.zeros(num_rows, 1, dtype=torch.uint8), torch.zeros(num_rows, dtype=torch.bool))
    cache = RowCache(int(num_rows * NEAR_SHARE), BATCH_SIZE, num_rows, store)
    is_known, misses = np.zeros(num_rows, np.bool_), 0
    for ids in batches:
        pinned = pin_rows([cache], [(0, torch.from_numpy(ids))])
        pinned.wait()
        misses += int(is_known[pinned.moves(0).fetched_rows.numpy()].sum())
        is_known[ids] = True
        pinned.unpin()
    return misses


def exact_misses(batches: list[Ids], num_rows: int, score: Score) -> int:
    """Return the misses of a cache that evicts the row with the lowest score."""
    num_slots, used, misses = int(num_rows * NEAR_SHARE), 0, 0
    scores, is_near, is_known = np.zeros(num_rows), np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
    for number, ids in enumerate(batches):
        rows = np.unique(ids)
        missing = rows[~is_near[rows]]
        misses += int(is_known[missing].sum())
        is_known[rows] = True
        score(scores, rows, number)
        surplus = used + len(missing) - num_slots
        if surplus > 0:
            is_near[rows] = False  # they stay
            near = np.flatnonzero(is_near)
            is_near[near[np.argpartition(scores[near], surplus - 1)[:surplus]]] = False
        is_near[rows] = True
        used = min(used + len(missing), num_slots)
    return misses


def lru(scores: NDArray[np.float64], rows: Ids, number: int) -> None:
    scores[rows] = number


def lfu(scores: NDArray[np.float64], rows: Ids, number: int) -> None:
    scores[rows] = np.floor(scores[rows]) + 1 + number * 1e-9


def belady(batches: list[Ids], num_rows: int) -> Score:
    last, coming = np.full(num_rows, len(batches)), []
    for number in range(len(batches) - 1, -1, -1):
        rows = np.unique(batches[number])
        coming.append(last[rows])
        last[rows] = number

    def score(scores: NDArray[np.float64], rows: Ids, number: int) -> None:
        scores[rows] = -coming[len(batches) - 1 - number]

    return score


def measure_misses(options: argparse.Namespace) -> bool:
    tables = [n // SCALE for n in CARDINALITIES if n // SCALE * NEAR_SHARE >= 2 * BATCH_SIZE]
    good = True
    for kind, limit in LIMITS.items():
        totals = dict.fromkeys(("ours", "LRU", "LFU", "Belady"), 0)
        for num_rows in tables:
            batches = batches_of(kind, num_rows, options.num_batches)
            totals["ours"] += near_misses(batches, num_rows)
            for name, score in {"LRU": lru, "LFU": lfu, "Belady": belady(batches, num_rows)}.items():
                totals[name] += exact_misses(batches, num_rows, score)
        lookups = len(tables) * options.num_batches * BATCH_SIZE
        print(kind, *(f"{name} {misses / lookups:.4f}" for name, misses in totals.items()))
        peer = "LRU" if kind == "still" or totals["LRU"] < totals["LFU"] else "LFU"
        good &= totals["ours"] <= limit * totals[peer]
        for name in ("LRU", "LFU", "Belady"):
            case = f"{len(tables)} tables / {SCALE}, {kind}, 10 % near"
            ours, peer_value = totals["ours"] / lookups, totals[name] / lookups
            record("tiers", case, "near rows", ours, "misses a lookup", peer=name, peer_value=peer_value,
                   packages=("numpy",))  # fmt: skip
    return good
