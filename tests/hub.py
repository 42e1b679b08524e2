# SPDX-License-Identifier: MIT
"""A hub on this machine: enough of the protocol for a repo whose files the client has cached already."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextlib.contextmanager
def fake_hub(source: Path, commit: str, refused_token: str = "") -> Iterator[str]:
    """Serves the files of `source` as every repo's `commit`; answers 401 to `refused_token`. Yields its address."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            file = source / self.path.split("?")[0].rsplit("/", 1)[-1]
            if refused_token and self.headers.get("Authorization") == f"Bearer {refused_token}":
                return self._send(401, {"X-Error-Message": "Invalid credentials"}, b"")
            if re.fullmatch(rf"/api/models/[^/]+/[^/]+(/revision/(main|{commit}))?", self.path.split("?")[0]):
                return self._send(
                    200, {"Content-Type": "application/json"}, json.dumps({"id": "o/n", "sha": commit}).encode(), body
                )
            if "/resolve/" not in self.path or not file.is_file():
                return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"")
            data = file.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            return self._send(200, {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}, data, body)

        def _send(self, code: int, headers: dict[str, str], data: bytes, body: bool = True) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
