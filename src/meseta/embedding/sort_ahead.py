"""Sort of ids on a separate stream of a GPU, next to the dense part of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meseta.ops.row_update import Bags, SortedRowIds, UpdateGroup, sort_row_ids


@dataclass(frozen=True)
class SortAhead:
    """Sort in progress of the ids of a batch."""

    groups: tuple[UpdateGroup, ...]
    bags: Bags
    sorted_ids: tuple[SortedRowIds | None, ...]
    done: Any  # CUDA event

    @staticmethod
    def start(stream: Any, groups: Sequence[UpdateGroup], bags: Bags) -> SortAhead:
        """Start to sort in `stream`, after the current work of the current stream."""
        # The current stream has used earlier results before they were freed. `stream` waits for it, and may therefore
        # reuse their memory.
        stream.wait_stream(torch.cuda.current_stream(bags.ids.device))
        with torch.cuda.stream(stream), torch.no_grad():
            sorted_ids = tuple(sort_row_ids(group, bags) for group in groups)
        for tensor in (bags.ids, bags.offsets, bags.weights):
            if tensor is not None:
                tensor.record_stream(stream)  # A dropped batch may free its ids before they are sorted.
        return SortAhead(tuple(groups), bags, sorted_ids, stream.record_event())

    def wait(self) -> None:
        """Let the current stream wait for the sort."""
        torch.cuda.current_stream(self.bags.ids.device).wait_event(self.done)

    def select(self, group: UpdateGroup, bags: Bags) -> SortedRowIds | None:
        """Return the result for a group, or `None` for other bags. Call `wait` before."""
        # Micro-batches and groups of features are merged into new bags.
        if bags.ids is not self.bags.ids:
            return None
        pairs = zip(self.groups, self.sorted_ids, strict=True)
        return next((result for sorted_group, result in pairs if sorted_group is group), None)
