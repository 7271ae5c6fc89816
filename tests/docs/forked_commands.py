"""`meseta`, `torchrun` and `python SCRIPT` for shells, forked from a process that has imported torch: a page starts
many, and an import takes seconds.

bash: meseta train run.yaml -- socket: words, folder, environment, open files --> fork: the command
                            <-- its process, then its exit code ---------------
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import PROGRAMS, become_command

SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(len(request).to_bytes(8, "little") + request)
replies = server.makefile()
command = int(replies.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(command, number))
code = int(replies.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """Context manager that returns the folder of forked programs. This process has imported torch, and computed
    nothing."""
    folder.mkdir()
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        for program in PROGRAMS:
            script = folder / program
            script.write_text(SCRIPT.format(python=sys.executable, address=address, program=program))
            script.chmod(0o755)
        server = os.fork()
        if server == 0:
            _serve(listener)
    try:
        yield folder
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> None:
    """Fork the command, and send its process id and exit code to the script."""
    code = 1
    try:
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            program, arguments, folder, environment = json.loads(stream.read(size))
        command = os.fork()
        if command == 0:
            client.close()
            become_command(arguments, folder, environment, files, program=program)
        client.sendall(f"{command}\n".encode())
        _, status = os.waitpid(command, 0)
        code = 0
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    finally:
        os._exit(code)
