# SPDX-License-Identifier: MIT
"""A kernel that is there at once, does nothing and ends at once: what it takes is what jupyter_client itself takes.

python tests/benchmarks/bare_kernel.py: prints a port and serves one kernel after the other until its input ends. What
jupyter_client starts (`argv`) is a shell that names the connection file there, and ends when its kernel does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session

_SHELL = 'trap "" INT; exec 3<>/dev/tcp/127.0.0.1/"$0" && echo "$1" >&3 && read -r <&3'
_KINDS = {"shell": zmq.ROUTER, "control": zmq.ROUTER, "stdin": zmq.ROUTER, "iopub": zmq.XPUB, "hb": zmq.ROUTER}
_LINGER = 100  # ms for what was sent last
_INFO = {
    "protocol_version": "5.4",
    "implementation": "bare",
    "implementation_version": "1",
    "language_info": {"name": "none", "version": "1", "mimetype": "text/plain", "file_extension": ".txt"},
    "banner": "",
    "help_links": [],
}


@contextmanager
def running() -> Iterator[list[str]]:
    """The argv of such a kernel, while a process serves it."""
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        yield ["bash", "-c", _SHELL, server.stdout.readline().strip(), "{connection_file}"]
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


class _Kernel:
    """Between the start of one and its end."""

    def __init__(self, context: zmq.Context[Any], info: dict[str, Any]) -> None:
        self._session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
        self._sockets = {name: context.socket(kind) for name, kind in _KINDS.items()}
        for name, own in self._sockets.items():
            own.linger = _LINGER
            own.bind(f"tcp://{info['ip']}:{info[f'{name}_port']}")

    def run(self) -> None:
        poller = zmq.Poller()
        for own in self._sockets.values():
            poller.register(own, zmq.POLLIN)
        while all(self._answer(own) for own, _event in poller.poll()):
            continue
        for own in self._sockets.values():
            own.close()

    def _answer(self, own: Any) -> bool:
        """False after a request to end."""
        if own is self._sockets["hb"]:
            own.send_multipart(own.recv_multipart())
        elif own is self._sockets["iopub"]:
            own.recv()
            self._session.send(own, "iopub_welcome", {"subscription": ""}, ident=b"iopub_welcome")
        else:
            idents, request = self._session.recv(own, 0)
            kind = request["msg_type"]
            self._status("busy", request)
            content = {"status": "ok", "execution_count": 1, **(_INFO if kind == "kernel_info_request" else {})}
            self._session.send(own, kind.replace("request", "reply"), content, parent=request, ident=idents)
            self._status("idle", request)
            return bool(kind != "shutdown_request")
        return True

    def _status(self, state: str, request: dict[str, Any]) -> None:
        content = {"execution_state": state}
        self._session.send(self._sockets["iopub"], "status", content, parent=request, ident=b"status")


def _serve(listener: socket.socket) -> None:
    while True:
        starter, _address = listener.accept()
        with starter, starter.makefile() as said, zmq.Context() as context:  # its end waits until the ports are free
            _Kernel(context, json.loads(Path(said.readline().strip()).read_text())).run()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        sys.stdin.read()
        os._exit(0)  # a kernel may be at work


if __name__ == "__main__":
    main()
