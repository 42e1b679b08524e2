# SPDX-License-Identifier: MIT
"""Requests about code and about the kernel: each function makes the content of one kind of reply."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from IPython.core import release
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

Content = dict[str, Any]

_HELP_LINKS = (
    ("Python Reference", f"https://docs.python.org/{sys.version_info[0]}.{sys.version_info[1]}"),
    ("IPython Reference", "https://ipython.readthedocs.io/en/stable/"),
    ("NumPy Reference", "https://docs.scipy.org/doc/numpy/reference/"),
    ("SciPy Reference", "https://docs.scipy.org/doc/scipy/reference/"),
    ("Matplotlib Reference", "https://matplotlib.org/contents.html"),
    ("SymPy Reference", "http://docs.sympy.org/latest/index.html"),
    ("pandas Reference", "https://pandas.pydata.org/pandas-docs/stable/"),
)


def kernel_info(shell: Any, features: list[str]) -> Content:
    return {
        "status": "ok",
        "protocol_version": "5.3",
        "implementation": "ipython",
        "implementation_version": release.version,
        "language_info": {
            "name": "python",
            "version": sys.version.split()[0],
            "mimetype": "text/x-python",
            "codemirror_mode": {"name": "ipython", "version": sys.version_info[0]},
            "pygments_lexer": "ipython3",
            "nbconvert_exporter": "python",
            "file_extension": ".py",
        },
        "banner": shell.banner,
        "help_links": [{"text": text, "url": url} for text, url in _HELP_LINKS],
        "supported_features": features,
    }


def complete(shell: Any, content: Content) -> Content:
    code, cursor = content["code"], content.get("cursor_pos")
    if cursor is None:
        cursor = len(code)
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, cursor)))
    types = [
        {"start": one.start, "end": one.end, "text": one.text, "type": one.type, "signature": one.signature}
        for one in found
    ]
    return {
        "matches": [one.text for one in found],
        "cursor_start": found[0].start if found else cursor,
        "cursor_end": found[0].end if found else cursor,
        "metadata": {"_jupyter_types_experimental": types},
        "status": "ok",
    }


def inspect(shell: Any, content: Content) -> Content:
    name = token_at_cursor(content["code"], content["cursor_pos"])
    reply: Content = {"status": "ok", "data": {}, "metadata": {}, "found": True}
    try:
        bundle = shell.object_inspect_mime(
            name,
            detail_level=content.get("detail_level", 0),
            omit_sections=set(content.get("omit_sections", [])),
        )
    except KeyError:
        reply["found"] = False
        return reply
    reply["data"].update(bundle)
    if not shell.enable_html_pager:
        reply["data"].pop("text/html", None)
    return reply


def history(shell: Any, content: Content) -> Content:
    manager = shell.history_manager
    kind, raw, output = content["hist_access_type"], content["raw"], content["output"]
    found: Any = []
    if kind == "tail":
        found = manager.get_tail(content.get("n"), raw=raw, output=output, include_latest=True)
    elif kind == "range":
        session, start, stop = content.get("session", 0), content.get("start", 0), content.get("stop")
        lines = manager.get_range(session, start, stop, raw=raw, output=output)
        # IPython calls the session that runs 0; clients know it by the number that "tail" gives.
        found = [(number or manager.session_number, line, text) for number, line, text in lines]
    elif kind == "search":
        unique = content.get("unique", False)
        found = manager.search(content.get("pattern"), raw=raw, output=output, n=content.get("n"), unique=unique)
    return {"status": "ok", "history": list(found)}


def is_complete(shell: Any, content: Content) -> Content:
    status, indent = shell.input_transformer_manager.check_complete(content["code"])
    reply: Content = {"status": status}
    if status == "incomplete":
        reply["indent"] = " " * (indent or 0)
    return reply


_measured: dict[int, Any] = {}  # the processes that usage() saw last: cpu_percent compares with the call before


def usage() -> Content:
    reply: Content = {"hostname": socket.gethostname(), "pid": os.getpid()}
    try:
        import psutil
    except ImportError:
        reply["cpu_count"] = os.cpu_count()
        return reply
    me = psutil.Process()
    now = {process.pid: _measured.get(process.pid, process) for process in [me, *me.children(recursive=True)]}
    _measured.clear()
    _measured.update(now)
    cpu, memory = 0.0, 0
    for process in now.values():
        try:
            cpu += process.cpu_percent()
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue
    reply.update(kernel_cpu=cpu, kernel_memory=memory)
    if host := psutil.cpu_percent():
        reply["host_cpu_percent"] = host
    reply["cpu_count"] = psutil.cpu_count(logical=True)
    reply["host_virtual_memory"] = dict(psutil.virtual_memory()._asdict())
    return reply
