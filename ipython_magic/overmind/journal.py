# SPDX-License-Identifier: MIT
"""The last loads of every process of this user: a small file beside the daemon's socket, for `overmind why`.

JSON lines, each written with one append, so that processes do not mix. Cut to its newest half when it grows past
the limit. Losing lines is allowed, failing a load is not: every fault is swallowed here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from overmind import _core, log
from overmind.records import LoadRecord

_LIMIT = 128 * 1024  # bytes, some 400 loads


def path() -> Path:
    """Where the file is, whether it exists or not."""
    return Path(_place())


def _place() -> str:
    return f"{_core.config().instance_dir}/history.jsonl"


def append(record: LoadRecord) -> None:
    """Adds one line; about 30 us. Never raises. Nothing is created where no daemon has been."""
    try:
        _append(_place(), json.dumps({"pid": os.getpid(), **vars(record)}))
    except FileNotFoundError:
        log.logger.debug("no runtime folder: %s is not kept for `overmind why`", record)
    except (OSError, ValueError, TypeError, _core.OvermindError):
        log.logger.debug("could not keep %s for `overmind why`", record, exc_info=True)


def _append(file: str, line: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o600)
    try:
        os.write(descriptor, line.encode("utf-8", "replace") + b"\n")
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > _LIMIT:
        _cut(Path(file))


def _cut(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    shorter = file.with_name(f"{file.name}.{os.getpid()}")
    shorter.write_bytes(b"".join(lines[len(lines) // 2 :]))
    os.replace(shorter, file)


def read() -> list[dict[str, object]]:
    """The records, oldest first, each with the `pid` that made it. Empty if there are none."""
    try:
        lines = path().read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "outcome" in record:
            found.append(record)
    return found
