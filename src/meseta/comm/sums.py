"""Sums over ranks in one order of additions, whatever way the numbers take.

What a rank adds is x[host, place]. Every number of the sum is

    (x[0,0] + x[0,1] + ...) + (x[1,0] + x[1,1] + ...) + ...

left to right over the ranks of a host, then left to right over hosts. Who adds it, and over which links its terms come,
changes no bit of it; and neither do the bounds of pieces. Of a buffer on two hosts of two ranks:

    flat         pieces to their owners     | a | b | c | d |   each from all four ranks
                 added, and back to all

    hierarchical inside a host              |   a   |   b   |   each from the two ranks of the host
                 among twins                | a | a'|           host sums of both cross-host peers ("cross_host"),
                 or along a chain                               or handed on from host to host
                 inside a host, back        |   a   |   b   |

(arXiv 2104.05158, section 4.2.1; the two levels are those of a hierarchical all-reduce). Two ranks alone send each
other all they have, where it is short, and both add: the same bytes in one phase.

With a codec what crosses hosts is rounded, always by the way of twins: the sum of each host is encoded once, what it
decodes to is added in the order of hosts by the owner of a piece, and the total is encoded once more. All ranks keep
what that decodes to, the owner and those of one host too:

    total = decode(encode(decode(encode(host 0)) + decode(encode(host 1)) + ...))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm.messages import Peer, PendingExchange
from meseta.comm.sum_codec import SumCodec, pad_to_blocks
from meseta.spec.codecs import NUM_CHAIN_CHUNKS, AllReduceAlgorithm

CHUNK_ALIGNMENT = 16
"""Pieces begin at multiples of so many numbers."""
CHUNK_BYTES = 2**20
"""Of each rank's part in a buffer so much is added before other exchanges may pass; half as much of a long one."""
LARGE_BUFFER_BYTES = 2**24
"""More is long: what passes it waits for half a piece on average, and pieces cost it little."""
MAX_ONE_PHASE_BYTES = 2**16
"""What two ranks send each other whole, and both add: the same bytes as in two phases of halves, and one latency."""


@dataclass(frozen=True)
class OrderedSum:
    """Adds buffers over `size` ranks on hosts of `per_host`."""

    rank: int
    size: int
    ranks_per_host: int
    algorithm: AllReduceAlgorithm
    start_exchange: Callable[[Sequence[Peer]], PendingExchange]
    """Begins to send each peer something, and to receive something from it."""
    scratch: Callable[[int, Tensor], Tensor]
    """[n] numbers as those of a tensor, until it is asked again: memory for what comes in."""
    codec: SumCodec | None = None
    """How numbers cross hosts; None: as they are."""

    def all_reduce(self, buffer: Tensor) -> None:
        """[n], in place: the sum, on every rank. In chunks."""
        num_coded = 0 if self.codec is None else self.codec.num_encoded
        first = 0
        for chunk in buffer[:num_coded].split(self._chunk_size(buffer)) if num_coded else ():
            self._reduce_encoded_chunk(chunk, first)
            first += chunk.numel()
        for chunk in buffer[num_coded:].split(self._chunk_size(buffer)):
            self._reduce_chunk(chunk)

    def reduce_scatter_intra_host(self, total: Tensor, pieces: Tensor) -> None:
        """[m] and [per_host, m]: the sum over this host of the piece of this rank's place."""
        ordered_sum(self._exchange_chunks(self._host_ranks, [*pieces]), total)

    def all_reduce_inter_host(self, total: Tensor) -> None:
        """[m], in place: the sum over the ranks at this place of all hosts."""
        if self.codec is None:
            self._reduce_inter_host(total)
            return
        padded = pad_to_blocks(total)
        self._reduce_encoded_inter_host(padded, 0)
        if padded is not total:
            total.copy_(padded[: total.numel()])

    @property
    def _host_ranks(self) -> range:
        first = self.rank - self.rank % self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    @property
    def _cross_host_peers(self) -> range:
        return range(self.rank % self.ranks_per_host, self.size, self.ranks_per_host)

    def _chunk_size(self, buffer: Tensor) -> int:
        """Numbers of a chunk."""
        num_bytes = CHUNK_BYTES if buffer.nbytes <= LARGE_BUFFER_BYTES else CHUNK_BYTES // 2
        return max(self.size * num_bytes // buffer.element_size() // CHUNK_ALIGNMENT, 1) * CHUNK_ALIGNMENT

    def _reduce_chunk(self, buffer: Tensor) -> None:
        if self.algorithm == "flat" or self.ranks_per_host in (1, self.size):
            ranks = range(self.size)
            if self.algorithm == "chain" and self.ranks_per_host == 1:
                self._reduce_along_chain(ranks, buffer)
            else:
                self._reduce_among(ranks, buffer, self.ranks_per_host)
            return
        place, host = self.rank % self.ranks_per_host, self._host_ranks
        cuts = split_aligned(buffer, len(host))
        mine = self._reduce_scatter(host, cuts, len(host))
        self._reduce_inter_host(mine)
        self._exchange([Peer(r, mine, cuts[i]) for i, r in enumerate(host) if r != self.rank])
        assert mine.data_ptr() == cuts[place].data_ptr()

    def _reduce_encoded_chunk(self, buffer: Tensor, first: int) -> None:
        """A part of the buffer that begins at number `first`."""
        host = self._host_ranks
        if len(host) == 1:
            self._reduce_encoded_inter_host(buffer, first)
            return
        cuts = split_aligned(buffer, len(host))
        mine = self._reduce_scatter(host, cuts, len(host))
        before = sum(piece.numel() for piece in cuts[: self.rank - host.start])
        self._reduce_encoded_inter_host(mine, first + before)
        self._exchange([Peer(r, mine, cuts[i]) for i, r in enumerate(host) if r != self.rank])

    def _reduce_encoded_inter_host(self, buffer: Tensor, first: int) -> None:
        """Add what the ranks at this place have, in place, encoded on both ways; `buffer` begins at number `first`."""
        coding, twins, place = self.codec, self._cross_host_peers, self.rank // self.ranks_per_host
        assert coding is not None
        pieces = split_aligned(buffer, len(twins))
        firsts = [first, *accumulate((piece.numel() for piece in pieces), initial=first)][1:]
        sizes = [coding.encoded_bytes(piece.numel()) for piece in pieces]
        memory = self.scratch(sum(sizes) + len(twins) * sizes[place], buffer.new_empty(0, dtype=torch.uint8))
        coded, came = memory[: sum(sizes)].split(sizes), memory[sum(sizes) :].view(len(twins), sizes[place])
        for piece, out, number in zip(pieces, coded, firsts, strict=False):
            coding.encode(piece, out, number, place)
        came[place] = coded[place]
        self._exchange([Peer(r, coded[i], came[i]) for i, r in enumerate(twins) if r != self.rank])
        mine, term = pieces[place], torch.empty_like(pieces[place])
        coding.decode(came[0], mine)
        for of_host in came[1:]:
            coding.decode(of_host, term)
            mine += term
        coding.encode(mine, coded[place], firsts[place], None)
        self._exchange([Peer(r, coded[place], coded[i]) for i, r in enumerate(twins) if r != self.rank])
        for piece, out in zip(pieces, coded, strict=True):
            coding.decode(out, piece)

    def _reduce_inter_host(self, buffer: Tensor) -> None:
        """Add what the ranks at this place have, in place; each has the sum of its host."""
        if self.algorithm == "chain":
            self._reduce_along_chain(self._cross_host_peers, buffer)
        else:
            self._reduce_among(self._cross_host_peers, buffer, 1)

    def _reduce_among(self, ranks: range, buffer: Tensor, per_host: int) -> None:
        """Add what these ranks have, in place; `per_host` of them that follow each other are one host."""
        if len(ranks) == 1:
            return
        if len(ranks) == 2 and buffer.nbytes <= MAX_ONE_PHASE_BYTES:
            ordered_sum(self._exchange_chunks(ranks, [buffer, buffer]), buffer)
            return
        cuts = split_aligned(buffer, len(ranks))
        mine = self._reduce_scatter(ranks, cuts, per_host)
        self._exchange([Peer(r, mine, piece) for r, piece in zip(ranks, cuts, strict=True) if r != self.rank])

    def _reduce_scatter(self, ranks: range, cuts: Sequence[Tensor], per_host: int) -> Tensor:
        """The piece of this rank, added over `ranks`, in place."""
        mine = cuts[ranks.index(self.rank)]
        ordered_sum(self._exchange_chunks(ranks, cuts), mine, per_host)
        return mine

    def _exchange_chunks(self, ranks: range, pieces: Sequence[Tensor]) -> list[Tensor]:
        """This rank's piece as each of `ranks` has it; each of them gets its own."""
        mine = pieces[ranks.index(self.rank)]
        parts = [*self.scratch(len(ranks) * mine.numel(), mine).view(len(ranks), mine.numel())]
        parts[ranks.index(self.rank)] = mine
        self._exchange([Peer(r, pieces[i], parts[i]) for i, r in enumerate(ranks) if r != self.rank])
        return parts

    def _reduce_along_chain(self, ranks: range, buffer: Tensor) -> None:
        """Add what these ranks have, in place: from each to the next, and the sum back. A piece is on its way from one
        rank to the next while the piece after it is added."""
        place, nothing = ranks.index(self.rank), buffer.new_empty(0)
        before = ranks[place - 1] if place else None
        after = ranks[place + 1] if place + 1 < len(ranks) else None
        pieces, sent = split_aligned(buffer, NUM_CHAIN_CHUNKS), list[PendingExchange]()
        for piece in pieces:
            if before is not None:
                received = self.scratch(piece.numel(), piece)
                self._exchange([Peer(before, nothing, received)])
                ordered_sum([received, piece], piece)
            if after is not None:
                sent.append(self.start_exchange([Peer(after, piece, nothing)]))
        for piece in pieces:
            if after is not None:
                self._exchange([Peer(after, nothing, piece)])
            if before is not None:
                sent.append(self.start_exchange([Peer(before, piece, nothing)]))
        for swap in sent:
            swap.wait()

    def _exchange(self, peers: Sequence[Peer]) -> None:
        if peers:
            self.start_exchange(peers).wait()


def split_aligned(buffer: Tensor, count: int) -> list[Tensor]:
    """Views of `buffer` [n], one after the other, as equal as bounds at multiples of PIECE allow."""
    bounds = [i * buffer.numel() // count // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT for i in range(count)] + [buffer.numel()]
    return [buffer[a:b] for a, b in pairwise(bounds)]


def ordered_sum(parts: Sequence[Tensor], out: Tensor, per_host: int | None = None) -> None:
    """Add parts of one shape left to right, `per_host` of them (None: all) to the sum of a host, and those left to
    right. `out` may be one of them."""
    count = len(parts) if per_host is None else per_host
    if count == 1 or count == len(parts):
        _sum_left_to_right(parts, out)
        return
    hosts = [torch.empty_like(out) for _ in range(0, len(parts), count)]
    for host, first in zip(hosts, range(0, len(parts), count), strict=True):
        _sum_left_to_right(parts[first : first + count], host)
    _sum_left_to_right(hosts, out)


def _sum_left_to_right(parts: Sequence[Tensor], out: Tensor) -> None:
    """Left to right."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        torch.add(*parts, out=out)
    else:
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        out.copy_(total)
