"""Treemap of a plan: one column per rank and one box per shard, with areas in proportion to bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meseta.report.charts.markup import escape, svg, svg_text, tag
from meseta.spec import Plan, Shard, ShardingType
from meseta.spec.tables import ELEMENT_BYTES
from meseta.telemetry.formatting import format_bytes, format_count, format_quantity

if TYPE_CHECKING:
    from meseta.report.record import RunRecord

MAX_HEIGHT = 300.0
# Smaller boxes are too small for a label and for a tooltip.
MIN_BOX_AREA = 300.0
CHARACTER_WIDTH = 6.4
LINE_HEIGHT = 13.0
MAX_TOOLTIP_NAMES = 30


@dataclass(frozen=True, kw_only=True)
class DrawnShard:
    """Box of one shard on one rank."""

    table: str
    sharding: str
    part: str
    """Part of the table, such as 'whole', 'rows 2/4' or 'columns 1/2'."""
    size: str
    """Numbers of rows and columns as text."""
    num_bytes: int


def plan_section(record: RunRecord) -> str:
    """Return the treemap of a run's plan with its legend, or an empty string if the plan has no rows."""
    plan = record.plan
    if plan is None:
        return ""
    dtype = record.config_value("embedding.dtype") or "float32"
    held = shards_by_rank(plan, ELEMENT_BYTES.get(str(dtype), 4))
    totals = [sum(piece.num_bytes for piece in held[rank]) for rank in range(plan.num_ranks)]
    if not any(totals):
        return ""
    mean = sum(totals) / len(totals)
    balance = f"; the fullest rank holds {max(totals) / mean:.2f} times the mean" if plan.num_ranks > 1 else ""
    intro = (
        f"{format_quantity(len(plan.tables), 'table')} on {format_quantity(plan.num_ranks, 'rank')}, "
        f"{format_bytes(sum(totals))} of "
        f"{dtype} rows in total without optimizer states{balance}. Areas are in proportion to bytes."
    )
    return tag("p", escape(intro)) + _legend(plan, held) + _rank_figures(held, totals)


def plan_treemap(plan: Plan) -> str:
    """Return the treemap of a plan with its legend, or an empty string if the plan has no rows."""
    # A plan does not specify the dtype of rows.
    held = shards_by_rank(plan, ELEMENT_BYTES["float32"])
    totals = [sum(piece.num_bytes for piece in held[rank]) for rank in range(plan.num_ranks)]
    return _legend(plan, held) + _rank_figures(held, totals) if any(totals) else ""


def shards_by_rank(plan: Plan, bytes_per_number: int) -> dict[int, list[DrawnShard]]:
    """Return the boxes of each rank, the largest first. A replicated shard has a box on each of its ranks."""
    held: dict[int, list[DrawnShard]] = {rank: [] for rank in range(plan.num_ranks)}
    for entry in plan.tables:
        noun = {"column_wise": "columns", "table_column_wise": "columns", "grid": "piece"}.get(entry.sharding, "rows")
        for index, shard in enumerate(entry.shards):
            piece = DrawnShard(
                table=entry.table,
                sharding=entry.sharding,
                part=_part_label(noun, index, entry.shards),
                size=f"{format_count(shard.num_rows)} × {format_count(shard.num_columns)}",
                num_bytes=shard.num_rows * shard.num_columns * bytes_per_number,
            )
            for rank in shard.ranks:
                if rank in held:
                    held[rank].append(piece)
    return {rank: sorted(pieces, key=lambda p: -p.num_bytes) for rank, pieces in held.items()}


def _part_label(noun: str, index: int, shards: Sequence[Shard]) -> str:
    if len(shards) == 1:
        return "whole"
    # With several shards, a replicated first shard holds the hot rows of `hot_replicated`.
    if len(shards[0].ranks) > 1:
        return f"cold rows {index}/{len(shards) - 1}" if index else "hot rows"
    return f"{noun} {index + 1}/{len(shards)}"


def squarify(areas: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Divide a box into rectangles that are almost squares (squarified treemaps; Bruls, Huizing, van Wijk 2000).

    Args:
        areas: Areas of the rectangles in descending order. Their sum must be `width` * `height`.
        width: Width of the box.
        height: Height of the box.

    Returns:
        (x, y, width, height) of each rectangle.
    """
    boxes: list[tuple[float, float, float, float]] = []
    x = y = 0.0
    start = 0
    while start < len(areas):
        side = min(width, height)
        end, row = start + 1, areas[start]
        worst = _worst_aspect(areas[start:end], row, side)
        # Add rectangles to the row until the worst aspect ratio increases.
        while end < len(areas):
            longer = row + areas[end]
            aspect = _worst_aspect(areas[start : end + 1], longer, side)
            if aspect > worst:
                break
            end, row, worst = end + 1, longer, aspect
        depth = row / side
        along = 0.0
        for area in areas[start:end]:
            length = area / depth
            boxes.append((x, y + along, depth, length) if width >= height else (x + along, y, length, depth))
            along += length
        # The remaining box must not become empty or negative by rounding errors.
        if width >= height:
            x, width = x + depth, max(width - depth, 1e-9)
        else:
            y, height = y + depth, max(height - depth, 1e-9)
        start = end
    return boxes


def _worst_aspect(row: Sequence[float], total: float, side: float) -> float:
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))


def _legend(plan: Plan, held: dict[int, list[DrawnShard]]) -> str:
    num_tables: dict[str, int] = defaultdict(int)
    held_bytes: dict[str, int] = defaultdict(int)
    cost: dict[str, float] = defaultdict(float)
    for entry in plan.tables:
        num_tables[entry.sharding] += 1
        cost[entry.sharding] += entry.cost
    for pieces in held.values():
        for piece in pieces:
            held_bytes[piece.sharding] += piece.num_bytes
    items = []
    for name in sorted(num_tables, key=lambda name: -held_bytes[name]):
        facts = f"{format_quantity(num_tables[name], 'table')}, {format_bytes(held_bytes[name])}"
        if cost[name]:
            facts += f", predicted {1e3 * cost[name]:.3g} ms per step over all ranks"
        swatch = tag("span", class_=f"swatch {_css_class(name)}")
        items.append(tag("li", swatch, tag("b", escape(name)), " ", escape(facts)))
    return tag("ul", *items, class_="legend")


def _rank_figures(held: dict[int, list[DrawnShard]], totals: list[int]) -> str:
    """Return a figure with a treemap for each rank."""
    # All figures have the same width and scale, so their heights are in proportion to the memory of the ranks.
    num_ranks = len(totals)
    width = {1: 1072.0, 2: 528.0, 3: 346.0}.get(num_ranks, 256.0 if num_ranks <= 8 else 120.0)
    area_per_byte = width * MAX_HEIGHT / max(totals)
    treemaps = []
    for rank, total in enumerate(totals):
        caption = tag("figcaption", tag("b", escape(f"rank {rank}")), " ", escape(format_bytes(total)))
        treemaps.append(tag("figure", caption, _rank_treemap(rank, held[rank], width, area_per_byte)))
    if num_ranks == 1:
        return tag("div", *treemaps, class_="ranks scroll")
    style = f"grid-template-columns:repeat(auto-fit,minmax(min({int(width * 0.8)}px,100%),1fr))"
    return tag("div", *treemaps, class_="ranks", style=style)


def _rank_treemap(rank: int, pieces: Sequence[DrawnShard], width: float, area_per_byte: float) -> str:
    # Small shards share one box. If that is still too small, only a note below the treemap lists them.
    shown = [p for p in pieces if p.num_bytes * area_per_byte >= MIN_BOX_AREA]
    others = [p for p in pieces[len(shown) :] if p.num_bytes]
    areas = [p.num_bytes * area_per_byte for p in shown]
    others_area = sum(p.num_bytes for p in others) * area_per_byte
    has_box = others_area >= MIN_BOX_AREA
    if has_box:
        areas.append(others_area)
    order = sorted(range(len(areas)), key=lambda i: -areas[i])
    boxes: list[tuple[float, float, float, float]] = []
    height = sum(areas) / width
    if areas:
        placed = squarify([areas[i] for i in order], width, height)
        boxes = [placed[order.index(i)] for i in range(len(areas))]
    marks = [
        _box(
            boxes[i],
            _css_class(p.sharding),
            [p.table, p.size if p.part == "whole" else p.part, format_bytes(p.num_bytes)],
            _tooltip(p),
        )
        for i, p in enumerate(shown)
    ]
    note = ""
    if others:
        schemes = {p.sharding for p in others}
        colour = _css_class(schemes.pop()) if len(schemes) == 1 else "others"
        summary = f"{format_quantity(len(others), 'other')}, {format_bytes(sum(p.num_bytes for p in others))}"
        if has_box:
            marks.append(
                _box(boxes[-1], colour, [format_quantity(len(others), "other")], f"{summary}\n{_list_shards(others)}")
            )
        note = tag("p", escape(f"and {summary}"), class_="note", title=_list_shards(others))
    drawing = svg(width, max(height, 2.0), f"Tables of rank {rank}", *marks, class_="chart plan") if marks else ""
    return drawing + note


def _tooltip(piece: DrawnShard) -> str:
    return f"{piece.table}\n{piece.sharding}, {piece.part}\n{piece.size}\n{format_bytes(piece.num_bytes)}"


def _list_shards(pieces: Sequence[DrawnShard]) -> str:
    lines = [f"{p.table}: {p.size}, {format_bytes(p.num_bytes)}, {p.sharding}" for p in pieces[:MAX_TOOLTIP_NAMES]]
    return "\n".join(lines + [f"and {len(pieces) - MAX_TOOLTIP_NAMES} more"] * (len(pieces) > MAX_TOOLTIP_NAMES))


def _box(box: tuple[float, float, float, float], colour: str, lines: Sequence[str], hover: str) -> str:
    """Draw a box with the lines that fit. The first line may be truncated. Other lines are complete or left out."""
    x, y, width, height = box
    inner_width, inner_height = max(width - 1.5, 0.5), max(height - 1.5, 0.5)
    marks = [tag("title", escape(hover)), tag("rect", x=x, y=y, width=inner_width, height=inner_height, rx=1.5)]
    num_characters = int((inner_width - 8) / CHARACTER_WIDTH)
    num_lines = int((inner_height - 4) / LINE_HEIGHT)
    name, *details = lines
    if num_lines and num_characters >= min(len(name), 4):
        fitted = name if len(name) <= num_characters else name[: num_characters - 1] + "…"
        details = [detail for detail in details if len(detail) <= num_characters]
        kept = [fitted, *details[max(len(details) - num_lines + 1, 0) :]]
        for i, line in enumerate(kept):
            marks.append(svg_text(x + 5, y + LINE_HEIGHT * (i + 1), line, "box-detail" if i else "box-name"))
    return tag("g", *marks, class_=f"box {colour}")


def _css_class(sharding: str) -> str:
    # In style.css, the class 'grid' is the layout of charts.
    if sharding == "grid":
        return "scheme-grid"
    return sharding if sharding in list(ShardingType) else "others"
