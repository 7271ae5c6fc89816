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
EVAL_EVERY, EVAL_BATCHES, EVAL_LIMIT = 200, 50, 1.05
"""Evaluations of EVAL_BATCHES after every EVAL_EVERY batches, and the maximum of misses relative to training without
them."""


def batches_of(kind: str, num_rows: int, num_batches: int, seed: int = 3) -> list[Ids]:
    """Return Zipf ids. Popular rows are constant, change gradually (a fifth in total), or are replaced nine times."""
    random, batches = np.random.default_rng(seed), []
    for number in range(num_batches):
        share = {"still": 0.0, "moving": 0.2 * number / num_batches, "replaced": number * 10 // num_batches / 10}[kind]
        shift = permute_rows(np.array([int(share * num_rows)]), num_rows)
        batches.append((zipf_ids(random, BATCH_SIZE, num_rows) + shift) % num_rows)
    return batches


def with_evaluations(trained: list[Ids], evaluated: list[Ids]) -> tuple[list[Ids], NDArray[np.bool_]]:
    """Return batches with evaluations in between, and whether each is an evaluation."""
    batches: list[Ids] = []
    is_read: list[bool] = []
    for first in range(0, len(trained), EVAL_EVERY):
        some = trained[first : first + EVAL_EVERY]
        others = [evaluated[(first + i) % len(evaluated)] for i in range(EVAL_BATCHES)]
        batches += some + others
        is_read += [False] * len(some) + [True] * len(others)
    return batches, np.array(is_read)


def near_misses(batches: list[Ids], num_rows: int, is_read: NDArray[np.bool_] | None = None) -> int:
    """Return the misses of our cache in training. The first access of a row is not a miss."""
    store = memory_backing_store(torch.zeros(num_rows, 1, dtype=torch.uint8), torch.zeros(num_rows, dtype=torch.bool))
    cache = RowCache(int(num_rows * NEAR_SHARE), BATCH_SIZE, num_rows, store)
    is_known, misses = np.zeros(num_rows, np.bool_), 0
    for number, ids in enumerate(batches):
        to_read = is_read is not None and bool(is_read[number])
        pinned = pin_rows([cache], [(0, torch.from_numpy(ids))], read_only=to_read)
        pinned.wait()
        if not to_read:
            misses += int(is_known[pinned.moves(0).fetched_rows.numpy()].sum())
            is_known[ids] = True
        pinned.unpin()
    return misses


def exact_misses(batches: list[Ids], num_rows: int, score: Score, is_read: NDArray[np.bool_] | None = None) -> int:
    """Return the misses of a cache that evicts the row with the lowest score. Misses of evaluations are not counted."""
    num_slots, used, misses = int(num_rows * NEAR_SHARE), 0, 0
    scores, is_near, is_known = np.zeros(num_rows), np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
    for number, ids in enumerate(batches):
        rows = np.unique(ids)
        missing = rows[~is_near[rows]]
        if is_read is None or not is_read[number]:
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
    """Measure tables whose tenth holds at least two batches. Returns whether the requirements are met."""
    tables = [n // SCALE for n in CARDINALITIES if n // SCALE * NEAR_SHARE >= 2 * BATCH_SIZE]
    good = _measure_evaluations(tables, options)
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
            record(
                "tiers",
                case,
                "near rows",
                ours,
                "misses a lookup",
                peer=name,
                peer_value=peer_value,
                packages=("numpy",),
            )
    return good


def _measure_evaluations(tables: list[int], options: argparse.Namespace) -> bool:
    """Measure how evaluations change the misses of training."""
    ways = ("ours", "ours, evaluated", "LRU", "LRU, evaluated")
    totals = dict.fromkeys(ways, 0)
    for num_rows in tables:
        trained = batches_of("still", num_rows, options.num_batches)
        evaluated = batches_of("still", num_rows, options.num_batches // 4, seed=4)
        batches, is_read = with_evaluations(trained, evaluated)
        totals["ours"] += near_misses(trained, num_rows)
        totals["ours, evaluated"] += near_misses(batches, num_rows, is_read)
        totals["LRU"] += exact_misses(trained, num_rows, lru)
        totals["LRU, evaluated"] += exact_misses(batches, num_rows, lru, is_read)
    lookups = len(tables) * options.num_batches * BATCH_SIZE
    case = f"{len(tables)} tables / {SCALE}, {EVAL_BATCHES} batches evaluated after each {EVAL_EVERY}, 10 % near"
    for name in ("ours", "LRU"):
        alone, between = totals[name], totals[f"{name}, evaluated"]
        print(f"evaluations in between: {name} {between / lookups:.4f} misses a lookup, {between / alone - 1:+.1%}")
        label = "near rows" if name == "ours" else name
        record(
            "tiers", case, label, between / lookups, "misses a lookup", peer="without evaluation",
            peer_value=alone / lookups, packages=("numpy",),
        )  # fmt: skip
    return totals["ours, evaluated"] <= EVAL_LIMIT * totals["ours"]
