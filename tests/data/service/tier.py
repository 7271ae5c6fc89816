"""A dispatcher and readers in this process, and digests of batches."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meseta.data import Batch
from meseta.data.service.client.reader import ReaderServiceAddress
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.keys import TlsServerKeys
from meseta.data.service.server.catalog import Catalog
from meseta.data.service.server.dispatch_server import DispatchServer
from meseta.data.service.server.endpoint_server import Endpoint
from meseta.data.service.server.lease_table import LeaseTable
from meseta.data.service.server.window_reader import DEFAULT_BUFFER_BYTES, ReadServer, WindowReader


@dataclass
class Tier:
    """Dispatcher and readers that serve a test."""

    dispatcher: DispatchServer
    leases: LeaseTable
    endpoint: Endpoint
    readers: list[ReadServer] = field(default_factory=list)
    decoders: list[WindowReader] = field(default_factory=list)
    """Decoder of each reader."""

    @property
    def service(self) -> ReaderServiceAddress:
        keys = None if self.endpoint.keys is None else self.endpoint.keys.folder
        return ReaderServiceAddress(url=self.dispatcher.url, keys=keys, reader_timeout_s=20.0)

    def add_reader(self, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> ReadServer:
        """Start one more reader and register it with the dispatcher."""
        dispatcher = DispatcherClient(self.dispatcher.url, self.dispatcher.credentials)
        decoder = WindowReader(dispatcher, buffer_bytes)
        server = ReadServer(replace(self.endpoint, credentials=dispatcher.credentials), decoder, dispatcher)
        server.wait_for_dispatcher()
        self.readers.append(server)
        self.decoders.append(decoder)
        return server


@contextmanager
def running(
    folders: Mapping[str, Path], num_readers: int, keys: TlsServerKeys | None = None, **options: Any
) -> Iterator[Tier]:
    """Context manager that runs a dispatcher of these datasets and readers."""
    with ExitStack() as stack:
        leases, endpoint = LeaseTable(), Endpoint(credentials=keys)
        tier = Tier(DispatchServer(endpoint, Catalog(folders), leases), leases, endpoint)
        stack.callback(tier.dispatcher.shutdown)
        stack.callback(lambda: [reader.stop() for reader in tier.readers])
        for _ in range(num_readers):
            tier.add_reader(**options)
        yield tier


class SlowFiles:
    """Replacement of `io` in meseta.data.dataset.part_files: a disk on which each read takes `delay_s`."""

    def __init__(self, delay_s: float = 0.04) -> None:
        class FileIO(io.FileIO):
            def readinto(self, buffer: Any, /) -> int | None:
                time.sleep(delay_s)
                return super().readinto(buffer)

        self.FileIO = FileIO


def digest(batch: Batch) -> tuple[Any, ...]:
    """Return a digest of the tensors of a batch, and its other fields."""
    content = hashlib.sha256()
    for tensor in batch.tensors:
        content.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest(), batch.sparse.keys, batch.num_padding, batch.position
