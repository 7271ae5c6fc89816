"""Marks of changed rows, with one bit per row and consumer."""

from __future__ import annotations

from enum import IntEnum
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from meseta.ops.row_marks.row_set import RowSet
from meseta.sparse.shapes import Int

ROWS_PER_WORD = 16
_LOW_BITS = 0x55555555
"""The lower bit of each row in a word."""
_CHUNK_WORDS = 1 << 16
# With fewer words, the words themselves stay in the processor's cache. With more, they do not fit there even when the
# log is flushed.
_LOG_WORD_RANGE = range(1 << 12, 1 << 17)
"""Numbers of words for which marks have a log. It has space for as many rows as there are words."""
_marks_lock = Lock()


class Consumer(IntEnum):
    """Consumer of marks. The value is the index of its bit."""

    CHECKPOINTS = 0
    SERVERS = 1


class RowMarks:
    """Marks of the rows of one shard.

    Operators set marks while they update rows (`TableRows.marks`), and writers of rows set them too. Each consumer has
    its own bits and clears only those. Marks do not depend on the tier or slot of a row.
    """

    # words[w]        | row 16 w + 15 | ... | row 16 w + 1 | row 16 w |     bits of a row: | servers | checkpoints |
    # words_and_log   | words | number of rows in the log | row, row, row, ... |
    #
    # Only the CPU has a log. The core appends updated rows to it and marks them some tens of steps later. A step
    # updates few rows of a large table, and each mark alone would load a cache line of words to set two bits.

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        """Create marks with no row marked."""
        self.num_rows = num_rows
        count = num_words(num_rows)
        room = 1 + count if torch.device(device).type == "cpu" and count in _LOG_WORD_RANGE else 0
        self.words_and_log: Int[Tensor, " words_and_log"] = torch.zeros(count + room, dtype=torch.int32, device=device)
        self.words: Int[Tensor, " words"] = self.words_and_log[:count]

    def add(self, rows: Int[Tensor, " n"], consumer: Consumer | None = None) -> None:
        """Mark rows for one consumer, or for all if it is `None`. `rows` must be sorted and unique."""
        if rows.numel() == 0:
            return
        rows = rows.to(self.words.device)
        first, last = int(rows[0]) // ROWS_PER_WORD, int(rows[-1]) // ROWS_PER_WORD
        with _marks_lock:  # A checkpoint is loaded by several threads, whose rows may share a word.
            part = self.words[first : last + 1]
            part |= mark_words(rows - first * ROWS_PER_WORD, len(part), 3 if consumer is None else 1 << consumer)

    def add_set(self, rows: RowSet, consumer: Consumer) -> None:
        """Mark a set of rows for one consumer."""
        for part in rows.parts():
            self.add(part, consumer)

    def add_range(self, first: int, stop: int) -> None:
        """Mark rows first..stop-1 for all consumers."""
        begin, end = num_words(first), stop // ROWS_PER_WORD
        if begin >= end:
            self.add(torch.arange(first, stop))
            return
        self.words[begin:end] = -1
        self.add(torch.arange(first, begin * ROWS_PER_WORD))
        self.add(torch.arange(end * ROWS_PER_WORD, stop))

    def marked_rows(self, consumer: Consumer) -> Int[Tensor, " n"]:
        """Return the rows marked for a consumer, sorted, as int64 on the CPU."""
        return self.marked_set(consumer).rows()

    def marked_set(self, consumer: Consumer) -> RowSet:
        """Return the set of rows marked for a consumer. Later marks do not change the set."""
        self._flush_log()
        parts = [np.empty(0, np.uint8)]
        for words in self.words.split(_CHUNK_WORDS):
            marked = (words.cpu().numpy().view(np.uint32) >> np.uint32(consumer)) & np.uint32(_LOW_BITS)
            parts.append(np.packbits(np.unpackbits(marked.view(np.uint8), bitorder="little")[::2], bitorder="little"))
        return RowSet(self.num_rows, np.concatenate(parts)[: -(-self.num_rows // 8)])

    def clear(self, consumer: Consumer) -> None:
        """Remove all marks of one consumer."""
        self._flush_log()
        other_bits = _LOW_BITS << (1 - consumer)
        # Words are int32, so a mask with the highest bit set must be negative.
        self.words &= other_bits - (1 << 32) if other_bits >> 31 else other_bits

    def _flush_log(self) -> None:
        log = self.words_and_log[len(self.words) :]
        if len(log) and (count := int(log[0])):
            self.add(log[1 : 1 + count].long().unique())
            log[0] = 0

    def num_bytes(self) -> int:
        """Return the memory of the marks and the log in bytes."""
        return self.words_and_log.numel() * self.words_and_log.element_size()


def num_words(num_rows: int) -> int:
    """Return the number of words for `num_rows` rows."""
    return -(-num_rows // ROWS_PER_WORD)


def mark_words(rows: Int[Tensor, " n"], count: int, bits: int = 3) -> Int[Tensor, " count"]:
    """Return int32 words in which the given unique rows have `bits` set. On a GPU the host does not wait."""
    words = torch.zeros(count, dtype=torch.int64, device=rows.device)
    marks = torch.full_like(rows, bits) << rows % ROWS_PER_WORD * 2
    return words.scatter_add_(0, rows // ROWS_PER_WORD, marks).to(torch.int32)
