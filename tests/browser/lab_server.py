# SPDX-License-Identifier: MIT
"""JupyterLab in a folder of its own, and a real Chromium before it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
from conftest import wait_for
from playwright.sync_api import Page, sync_playwright

START_SECONDS = 90
TOKEN = "a-token-for-this-test"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# What JupyterLab would ask a new user, and would fetch for that.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def environment(folder: Path) -> dict[str, str]:
    """All that Jupyter and IPython read and write lies in `folder`."""
    jupyter = folder / "jupyter"
    own = {
        "JUPYTER_DATA_DIR": jupyter / "data",
        "JUPYTER_CONFIG_DIR": jupyter / "config",
        "JUPYTER_RUNTIME_DIR": jupyter / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": jupyter / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": jupyter / "workspaces",
        "IPYTHONDIR": folder / "ipython",
    }
    for place in own.values():
        place.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "JUPYTER_PATH": "", **{name: str(place) for name, place in own.items()}}


@contextlib.contextmanager
def lab(folder: Path, env: dict[str, str]) -> Iterator[str]:
    """The address of a JupyterLab that shows `folder / "work"`. Everything that it started has ended afterwards."""
    for plugin, values in SETTINGS.items():
        path = Path(env["JUPYTERLAB_SETTINGS_DIR"], f"{plugin}.jupyterlab-settings")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--allow-root"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={folder / 'work'}"]
    address = f"http://127.0.0.1:{port}"
    with open(folder / "lab.log", "wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(lambda: server.poll() is not None or _answers(address), START_SECONDS, "JupyterLab answers")
        assert server.poll() is None, (folder / "lab.log").read_text()
        yield address
    finally:
        below = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        _gone, alive = psutil.wait_procs(below, timeout=20)
        for process in alive:
            process.kill()
    assert not alive, f"left by JupyterLab: {alive}"


def _answers(address: str) -> bool:
    request = urllib.request.Request(f"{address}/api/status", headers={"Authorization": f"token {TOKEN}"})
    with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(request, timeout=2) as reply:
        return bool(reply.status == 200)
    return False


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """An empty page of a Chromium that has never run before."""
    program = shutil.which("chromium")
    assert program, "no chromium: `make test-browser` installs it"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder / "chromium"),
            executable_path=program,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 1000},
        )
        try:
            yield context.pages[0]
        finally:
            context.close()
