"""Local S3 server behind a proxy that delays, cuts and rejects requests, as networks and stores do."""

from __future__ import annotations

import http.client
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import boto3
from moto.s3 import models
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
"""Settings of botocore: credentials, and the maximum number of attempts before s3fs and Meseta retry."""
FAULTS = ("delay", "unavailable", "cut", "answer lost", "answer cut")
"""Faults: a late answer, 503, a lost request, a lost answer, and half of an answer."""


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a server. A share `rate` of them meets a fault, drawn by a seed."""

    daemon_threads = True

    def __init__(self, server: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = server
        self.requests_by_fault: Counter[str] = Counter()
        """Number of requests by fault, or `none`."""
        self._lock = Lock()
        self.disturb(seed=0, rate=0.0)

    def disturb(self, seed: int, rate: float) -> None:
        """Start to disturb requests."""
        self._draw, self._rate = random.Random(seed), rate

    def next_fault(self) -> str | None:
        with self._lock:
            fault = self._draw.choice(FAULTS) if self._draw.random() < self._rate else None
            self.requests_by_fault[fault or "none"] += 1
            return fault

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault()
        if fault == "delay":
            time.sleep(0.05)
        if fault == "unavailable":
            self._answer(503, [], b"")
        elif fault == "cut":
            self.close_connection = True
        else:
            status, headers, content = self._ask(body)
            if fault == "answer lost":
                self.close_connection = True
            else:
                self._answer(status, headers, content, half=fault == "answer cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _hand_on

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        link = http.client.HTTPConnection(*self.server.server, timeout=30)
        try:
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            link.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, half: bool = False) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        declared = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", declared if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if half:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Discard log messages."""


@contextmanager
def s3_server() -> Iterator[tuple[Proxy, Any]]:
    """Context manager that yields the proxy and a client. The proxy's address is that of S3 for this process and its
    children, and the client reaches the server directly.

    Parts of uploads may have any size.
    """
    models.S3_UPLOAD_PART_MIN_SIZE = 1
    before = dict(os.environ)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    server = moto.get_host_and_port()
    proxy = Proxy(server)
    Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}"}
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{server[0]}:{server[1]}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    try:
        yield proxy, client
    finally:
        os.environ.clear()
        os.environ.update(before)
        S3FileSystem.clear_instance_cache()  # the next server has another address
        client.close()
        proxy.shutdown()
        proxy.server_close()
        moto.stop()


def keys_of(client: Any, bucket: str) -> set[str]:
    """Return the keys of all objects in a bucket."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {entry["Key"] for page in pages for entry in page.get("Contents", ())}


def uploads_of(client: Any, bucket: str) -> list[str]:
    """Return the keys of unfinished uploads."""
    return [entry["Key"] for entry in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]
