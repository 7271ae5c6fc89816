"""Encoding of inter-host sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm.messages import Peer, PendingExchange
from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves
from meseta.sparse.shapes import Int
from meseta.spec import COLUMN_BLOCK
from meseta.spec.codecs import NUM_CHAIN_CHUNKS, AllReduceAlgorithm, Codec

ONE_BLOCK = (COLUMN_BLOCK,)
_COPY_BLOCK = pack_moves([ColumnMove(0, 0, 0, COLUMN_BLOCK)])
DENSE_FP16_EXPONENT = 10
"""Exponent k of the factor 2^k for dense gradients in fp16. 6e-8 keeps 11 bits of precision, and 63 does not
overflow."""


@dataclass(frozen=True)
class SumCodec:
    """Codec of a float32 buffer, which is encoded in blocks of `COLUMN_BLOCK` elements."""

    codec: Codec
    num_encoded: int
    """Number of leading elements that are encoded, a multiple of `COLUMN_BLOCK`. The others are sent as float32."""
    rounding_key: tuple[int, int, str]
    """Seed, step and name from which stochastic rounding is derived."""
    half_range: HalfRange
    """Range of values in fp16. Other codecs ignore it."""
    block_ids: Int[Tensor, " blocks"] | None = None
    """Number of each block in the key of stochastic rounding. `None` means the index of the block in the buffer."""

    @property
    def encoded_block_bytes(self) -> int:
        return self.codec.row_bytes(ONE_BLOCK)

    def encoded_bytes(self, count: int) -> int:
        """Return the encoded size of `count` elements, a multiple of `COLUMN_BLOCK`."""
        return count // COLUMN_BLOCK * self.encoded_block_bytes

    def encode(self, piece: Tensor, out: Tensor, first: int, host: int | None) -> None:
        """Encode `piece` [n] into `out`, uint8 [bytes].

        `first` is the index of the first element of the piece in the buffer. `host` is the host whose sum is encoded,
        or `None` for the total of all hosts.
        """
        view, half = out.view(-1, self.encoded_block_bytes), self.half_range if self.codec.name == "fp16" else None
        rounding = self._make_rounding(first // COLUMN_BLOCK, view.shape[0], host) if self.codec.scale_bytes else None
        sources = [piece.view(-1, COLUMN_BLOCK)]
        encode_columns(view, sources, _COPY_BLOCK, self.codec, ONE_BLOCK, rounding=rounding, half_range=half)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        view, matrix = coded.view(-1, self.encoded_block_bytes), out.view(-1, COLUMN_BLOCK)
        decode_columns(matrix, [view], _COPY_BLOCK, self.codec, [ONE_BLOCK], exponent=self.half_range.exponent)

    def _make_rounding(self, first: int, count: int, host: int | None) -> StochasticRounding:
        # Errors would add up if the sums of hosts and the total were rounded with the same random numbers.
        numbers = first if self.block_ids is None else self.block_ids[first : first + count]
        seed, step, name = self.rounding_key
        key = rounding_key(seed, step, name if host is None else f"{name} of host {host}")
        return StochasticRounding((key,), (0,), numbers)


def round_up_to_blocks(count: int) -> int:
    """Round a number of elements up to a multiple of the block size."""
    return -(-count // COLUMN_BLOCK) * COLUMN_BLOCK


def pad_to_blocks(buffer: Tensor) -> Tensor:
    """Return `buffer` [n] padded with zeros to a whole number of blocks."""
    missing = round_up_to_blocks(buffer.numel()) - buffer.numel()
    return buffer if not missing else torch.cat([buffer, buffer.new_zeros(missing)])


# Let x[host, place] be the data of a rank. Each element of the sum is
#
#     (x[0,0] + x[0,1] + ...) + (x[1,0] + x[1,1] + ...) + ...
#
# The ranks of a host are added from left to right, and then the hosts. The result does not depend on the rank that
# adds, on the links that are used, or on the bounds of pieces. Example with a buffer on two hosts of two ranks:
#
#     flat            pieces to their owners     | a | b | c | d |   each from all four ranks
#                     sums to all ranks
#
#     hierarchical    inside a host              |   a   |   b   |   each from the two ranks of the host
#                     between hosts              | a | a'|           sums of hosts, exchanged between cross-host peers
#                                                                    or passed along a chain of hosts
#                     inside a host              |   a   |   b   |   sums to all ranks of the host
#
# See section 4.2.1 of arXiv 2104.05158. Two ranks exchange a short buffer as a whole, and both add. This takes the same
# number of bytes in one phase.
#
# With a codec, data between hosts is rounded, and cross-host peers exchange it directly. The sum of each host is
# encoded once. The owner of a piece decodes the sums, adds them in the order of hosts, and encodes the total. All ranks
# keep the decoded total, including the owner:
#
#     total = decode(encode(decode(encode(host 0)) + decode(encode(host 1)) + ...))

CHUNK_ALIGNMENT = 16
"""Pieces start at multiples of this number of elements."""
CHUNK_BYTES = 2**20
"""Bytes per rank of a chunk of a buffer. Other exchanges may start between two chunks."""
LARGE_BUFFER_BYTES = 2**24
"""Buffers above this size have chunks of half the size. A waiting exchange waits for half a chunk on average, and the
overhead per chunk is small relative to a large buffer."""
MAX_ONE_PHASE_BYTES = 2**16
"""Maximum size of a buffer that two ranks exchange as a whole. Both add it, which saves one latency."""


@dataclass(frozen=True)
class OrderedSum:
    """Collectives of one sum over `size` ranks on hosts of `ranks_per_host` ranks."""

    rank: int
    size: int
    ranks_per_host: int
    algorithm: AllReduceAlgorithm
    start_exchange: Callable[[Sequence[Peer]], PendingExchange]
    """Function that starts an exchange with the given peers."""
    scratch: Callable[[int, Tensor], Tensor]
    """Function that returns memory for a number of elements like a tensor. The next call may return the same memory."""
    codec: SumCodec | None = None
    """Codec between hosts. `None` sends elements unchanged."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` [n] over all ranks in place, chunk by chunk."""
        num_coded = 0 if self.codec is None else self.codec.num_encoded
        first = 0
        for chunk in buffer[:num_coded].split(self._chunk_size(buffer)) if num_coded else ():
            self._reduce_encoded_chunk(chunk, first)
            first += chunk.numel()
        for chunk in buffer[num_coded:].split(self._chunk_size(buffer)):
            self._reduce_chunk(chunk)

    def reduce_scatter_intra_host(self, total: Tensor, pieces: Tensor) -> None:
        """Sum row i of `pieces` [ranks_per_host, m] over this host into `total` [m], with i the local index of this
        rank."""
        ordered_sum(self._exchange_chunks(self._host_ranks, [*pieces]), total)

    def all_reduce_inter_host(self, total: Tensor) -> None:
        """Sum `total` [m] over the cross-host peers in place."""
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
        piece = self._reduce_scatter(host, cuts, len(host))
        self._reduce_inter_host(piece)
        self._exchange([Peer(r, piece, cuts[i]) for i, r in enumerate(host) if r != self.rank])
        assert piece.data_ptr() == cuts[place].data_ptr()

    def _reduce_encoded_chunk(self, buffer: Tensor, first: int) -> None:
        host = self._host_ranks
        if len(host) == 1:
            self._reduce_encoded_inter_host(buffer, first)
            return
        cuts = split_aligned(buffer, len(host))
        piece_sum = self._reduce_scatter(host, cuts, len(host))
        before = sum(piece.numel() for piece in cuts[: self.rank - host.start])
        self._reduce_encoded_inter_host(piece_sum, first + before)
        self._exchange([Peer(r, piece_sum, cuts[i]) for i, r in enumerate(host) if r != self.rank])

    def _reduce_encoded_inter_host(self, buffer: Tensor, first: int) -> None:
        """Sum a buffer over the cross-host peers in place, with the codec. `first` is the index of its first
        element."""
        coding, peer_ranks, place = self.codec, self._cross_host_peers, self.rank // self.ranks_per_host
        assert coding is not None
        pieces = split_aligned(buffer, len(peer_ranks))
        firsts = [first, *accumulate((piece.numel() for piece in pieces), initial=first)][1:]
        sizes = [coding.encoded_bytes(piece.numel()) for piece in pieces]
        memory = self.scratch(sum(sizes) + len(peer_ranks) * sizes[place], buffer.new_empty(0, dtype=torch.uint8))
        coded, received = memory[: sum(sizes)].split(sizes), memory[sum(sizes) :].view(len(peer_ranks), sizes[place])
        for piece, out, number in zip(pieces, coded, firsts, strict=False):
            coding.encode(piece, out, number, place)
        received[place] = coded[place]
        self._exchange([Peer(r, coded[i], received[i]) for i, r in enumerate(peer_ranks) if r != self.rank])
        piece_total, term = pieces[place], torch.empty_like(pieces[place])
        coding.decode(received[0], piece_total)
        for encoded in received[1:]:
            coding.decode(encoded, term)
            piece_total += term
        coding.encode(piece_total, coded[place], firsts[place], None)
        self._exchange([Peer(r, coded[place], coded[i]) for i, r in enumerate(peer_ranks) if r != self.rank])
        for piece, out in zip(pieces, coded, strict=True):
            coding.decode(out, piece)

    def _reduce_inter_host(self, buffer: Tensor) -> None:
        if self.algorithm == "chain":
            self._reduce_along_chain(self._cross_host_peers, buffer)
        else:
            self._reduce_among(self._cross_host_peers, buffer, 1)

    def _reduce_among(self, ranks: range, buffer: Tensor, per_host: int) -> None:
        """Sum a buffer over `ranks` in place. Each `per_host` consecutive ranks are on one host."""
        if len(ranks) == 1:
            return
        if len(ranks) == 2 and buffer.nbytes <= MAX_ONE_PHASE_BYTES:
            ordered_sum(self._exchange_chunks(ranks, [buffer, buffer]), buffer)
            return
        cuts = split_aligned(buffer, len(ranks))
        piece_sum = self._reduce_scatter(ranks, cuts, per_host)
        self._exchange([Peer(r, piece_sum, piece) for r, piece in zip(ranks, cuts, strict=True) if r != self.rank])

    def _reduce_scatter(self, ranks: range, cuts: Sequence[Tensor], per_host: int) -> Tensor:
        own_cut = cuts[ranks.index(self.rank)]
        ordered_sum(self._exchange_chunks(ranks, cuts), own_cut, per_host)
        return own_cut

    def _exchange_chunks(self, ranks: range, pieces: Sequence[Tensor]) -> list[Tensor]:
        local_piece = pieces[ranks.index(self.rank)]
        parts = [*self.scratch(len(ranks) * local_piece.numel(), local_piece).view(len(ranks), local_piece.numel())]
        parts[ranks.index(self.rank)] = local_piece
        self._exchange([Peer(r, pieces[i], parts[i]) for i, r in enumerate(ranks) if r != self.rank])
        return parts

    def _reduce_along_chain(self, ranks: range, buffer: Tensor) -> None:
        """Sum a buffer over `ranks` in place along a chain. A piece is sent while the next piece is added."""
        # Partial sums go from the first rank to the last one. The totals go back.
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
    """Split `buffer` [n] into views of nearly equal size that start at multiples of `CHUNK_ALIGNMENT`."""
    bounds = [i * buffer.numel() // count // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT for i in range(count)] + [buffer.numel()]
    return [buffer[a:b] for a, b in pairwise(bounds)]


def ordered_sum(parts: Sequence[Tensor], out: Tensor, per_host: int | None = None) -> None:
    """Sum tensors of one shape into `out`, which may be one of them.

    Each `per_host` consecutive parts are added from left to right, and then their sums. `None` means all parts.
    """
    count = len(parts) if per_host is None else per_host
    if count == 1 or count == len(parts):
        _sum_left_to_right(parts, out)
        return
    hosts = [torch.empty_like(out) for _ in range(0, len(parts), count)]
    for host, first in zip(hosts, range(0, len(parts), count), strict=True):
        _sum_left_to_right(parts[first : first + count], host)
    _sum_left_to_right(hosts, out)


def _sum_left_to_right(parts: Sequence[Tensor], out: Tensor) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        torch.add(*parts, out=out)
    else:
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        out.copy_(total)
