# SPDX-License-Identifier: MIT
"""Connection files: where a kernel listens, and the key of its messages."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

PORTS = ("shell_port", "control_port", "stdin_port", "iopub_port", "hb_port")


class ConnectionFileError(Exception):
    """A connection file that this kernel can't serve; the text says why and what to do."""


def read(path: Path) -> dict[str, Any]:
    """What the file says, with defaults for what it leaves out (port 0: the system chooses). A missing file is all
    defaults, with a new key. ConnectionFileError: it is no connection file, or asks for what this kernel has not."""
    found: dict[str, Any] = {"key": secrets.token_hex(16)}
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConnectionFileError(f"{path} can't be read as a connection file: {error}") from error
    if not isinstance(found, dict):
        raise ConnectionFileError(f"{path} is no connection file: it holds no JSON object")
    if found.get("curve_secretkey") or found.get("curve_publickey"):
        raise ConnectionFileError(
            f"{path} asks for transport encryption (CurveZMQ), which this kernel does not have; "
            "use the ipykernel kernel, or switch transport_encryption off"
        )
    connection: dict[str, Any] = {"transport": "tcp", "ip": "127.0.0.1", "key": "", "signature_scheme": "hmac-sha256"}
    connection.update(dict.fromkeys(PORTS, 0))
    connection.update(found)
    connection["signature_scheme"] = connection["signature_scheme"] or "hmac-sha256"
    if connection["transport"] not in ("tcp", "ipc"):
        raise ConnectionFileError(f"{path}: the transport {connection['transport']!r} is neither tcp nor ipc")
    if connection["transport"] == "ipc":
        _choose_paths(connection)
    return connection


def complete(path: Path, connection: dict[str, Any], ports: dict[str, int]) -> bool:
    """Writes what was chosen into the file, if anything was; True if this made the file."""
    if path.exists() and all(connection[name] == port for name, port in ports.items()):
        return False
    made = not path.exists()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # 0600: it holds the key
    with os.fdopen(handle, "w") as file:
        json.dump({**connection, **ports}, file, indent=2)
    os.replace(temporary, path)
    return made


def _choose_paths(connection: dict[str, Any]) -> None:
    taken = {connection[name] for name in PORTS if connection[name]}
    port = 0
    for name in PORTS:
        while not connection[name]:
            port += 1
            if port not in taken and not os.path.exists(f"{connection['ip']}-{port}"):
                connection[name] = port
                taken.add(port)
