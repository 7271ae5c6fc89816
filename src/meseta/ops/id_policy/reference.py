"""Id policies by plain loops over Python integers."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.spec import IdPolicy

_MASK = (1 << 64) - 1


def apply_id_policy(
    bags: Sequence[Sequence[Sequence[int]]], num_rows: Sequence[int], policies: Sequence[IdPolicy]
) -> tuple[list[list[list[int]]], list[int], tuple[int, int, int] | None]:
    """Bags [F][B][length] -> (bags after the policies, ids outside per feature, first refused (feature, sample,
    id))."""
    fixed: list[list[list[int]]] = []
    num_outside = [0] * len(bags)
    first: tuple[int, int, int] | None = None
    for f, feature in enumerate(bags):
        fixed.append([])
        for b, bag in enumerate(feature):
            kept = []
            for i in bag:
                if 0 <= i < num_rows[f]:
                    kept.append(i)
                    continue
                num_outside[f] += 1
                if policies[f] == "error":
                    first = first or (f, b, i)
                    kept.append(0)
                elif policies[f] == "clamp":
                    kept.append(0 if i < 0 else num_rows[f] - 1)
                elif policies[f] == "hash":
                    kept.append(_mix(i) % num_rows[f])
            fixed[-1].append(kept)
    return fixed, num_outside, first


def _mix(i: int) -> int:
    mixed = (i + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) & ((1 << 63) - 1)
