"""Program whose even ranks send bytes to the next rank, which counts them: `link_program.py BYTES`."""

import os
import socket
import sys
import time

num_bytes = int(sys.argv[1])
rank, per_host = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
prefix = os.environ["MASTER_ADDR"].rsplit(".", 1)[0]


def address(peer: int) -> tuple[str, int]:
    """Return the address on which a rank listens. Each rank has another port."""
    return f"{prefix}.{1 + peer // per_host}", 5000 + peer


if rank % 2:
    with socket.create_server(address(rank)) as server:
        print("listens", flush=True)
        connection, _ = server.accept()
        with connection:
            received = 0
            while data := connection.recv(1 << 20):
                received += len(data)
            connection.sendall(b"!")
    print(received)
else:
    stop = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection(address(rank + 1))
            break
        except OSError:
            if time.monotonic() > stop:
                raise
            time.sleep(0.02)
    with connection:
        start = time.monotonic()
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(time.monotonic() - start)
