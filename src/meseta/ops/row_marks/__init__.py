"""Which rows were changed since somebody asked: two bits a row, one for each who may ask."""

from __future__ import annotations

from enum import IntEnum
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.row_marks.row_set import RowSet

ROWS_PER_WORD = 16
_LOW_BITS = 0x55555555
"""The lower bit of each row of a word."""
_CHUNK_WORDS = 1 << 16
_LOG_WORD_RANGE = range(1 << 12, 1 << 17)
"""How many words have a log, with room for as many rows: fewer stay in the processor's cache without one, and more do
not fit there all at once."""
_marks_lock = Lock()


class Consumer(IntEnum):
    """Who asks for changed rows; the number is that of its bit."""

    CHECKPOINTS = 0
    SERVERS = 1


class RowMarks:
    """Marks of the rows of one shard, which operators set as they step rows (`TableRows.marks`), and writers of rows.

        words[w]   | row 16 w + 15 | ... | row 16 w + 1 | row 16 w |     of a row: | servers | checkpoints |

    A row has its mark wherever it lies. Every consumer has bits of its own, and clears them alone.

    On a CPU a log may lie behind the words, where the core writes rows that it steps, and marks them some tens of steps
    later, all at once: a step has few rows of a large table, and each would bring a line of words from memory for two
    bits.

        words_and_log   | words | number of rows in the log | row, row, row, ... |
    """

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        """None is marked."""
        self.num_rows = num_rows
        count = num_words(num_rows)
        room = 1 + count if torch.device(device).type == "cpu" and count in _LOG_WORD_RANGE else 0
        self.words_and_log: Int[Tensor, " words_and_log"] = torch.zeros(count + room, dtype=torch.int32, device=device)
        self.words: Int[Tensor, " words"] = self.words_and_log[:count]

    def add(self, rows: Int[Tensor, " n"], consumer: Consumer | None = None) -> None:
        """Mark rows, ascending, each once; for one consumer, or for all."""
        if rows.numel() == 0:
            return
        rows = rows.to(self.words.device)
        first, last = int(rows[0]) // ROWS_PER_WORD, int(rows[-1]) // ROWS_PER_WORD
        with _marks_lock:  # a load writes in threads, whose rows may share a word
            part = self.words[first : last + 1]
            part |= mark_words(rows - first * ROWS_PER_WORD, len(part), 3 if consumer is None else 1 << consumer)

    def add_set(self, rows: RowSet, consumer: Consumer) -> None:
        """Mark rows for one consumer."""
        for part in rows.parts():
            self.add(part, consumer)

    def add_range(self, first: int, stop: int) -> None:
        """Mark consecutive rows for all."""
        begin, end = num_words(first), stop // ROWS_PER_WORD
        if begin >= end:
            self.add(torch.arange(first, stop))
            return
        self.words[begin:end] = -1
        self.add(torch.arange(first, begin * ROWS_PER_WORD))
        self.add(torch.arange(end * ROWS_PER_WORD, stop))

    def marked_rows(self, consumer: Consumer) -> Int[Tensor, " n"]:
        """Those that are marked for one, ascending, int64 on the CPU."""
        return self.marked_set(consumer).rows()

    def marked_set(self, consumer: Consumer) -> RowSet:
        """Return the rows that are marked for one consumer; later marks do not change the set."""
        self._flush_log()
        parts = [np.empty(0, np.uint8)]
        for words in self.words.split(_CHUNK_WORDS):
            marked = (words.cpu().numpy().view(np.uint32) >> np.uint32(consumer)) & np.uint32(_LOW_BITS)
            parts.append(np.packbits(np.unpackbits(marked.view(np.uint8), bitorder="little")[::2], bitorder="little"))
        return RowSet(self.num_rows, np.concatenate(parts)[: -(-self.num_rows // 8)])

    def clear(self, consumer: Consumer) -> None:
        """None is marked for this one."""
        self._flush_log()
        others = _LOW_BITS << (1 - consumer)
        self.words &= others - (1 << 32) if others >> 31 else others

    def _flush_log(self) -> None:
        """Mark the rows of the log, which is empty then."""
        log = self.words_and_log[len(self.words) :]
        if len(log) and (count := int(log[0])):
            self.add(log[1 : 1 + count].long().unique())
            log[0] = 0

    def num_bytes(self) -> int:
        """Of memory."""
        return self.words_and_log.numel() * self.words_and_log.element_size()


def num_words(num_rows: int) -> int:
    """Words for so many rows."""
    return -(-num_rows // ROWS_PER_WORD)


def mark_words(rows: Int[Tensor, " n"], count: int, bits: int = 3) -> Int[Tensor, " count"]:
    """int32 words in which these rows, each once, have `bits` and others none; the host need not know the rows."""
    words = torch.zeros(count, dtype=torch.int64, device=rows.device)
    marks = torch.full_like(rows, bits) << rows % ROWS_PER_WORD * 2
    return words.scatter_add_(0, rows // ROWS_PER_WORD, marks).to(torch.int32)
