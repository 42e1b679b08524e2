# SPDX-License-Identifier: MIT
"""F03: a zygote never touches a GPU, and a kernel from it chooses its GPUs as any kernel does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kernel_sessions import session
from overmind.kernel import kernelspec
from starts import ENGINES, forked_session, has_torch, warm_kernel, zygotes

# Imported behind torch in the zygote: from then on each question for a GPU is noted with the process that asks. Where
# torch is built without CUDA it believes from here on that it was built with it, and asks all the same.
COUNTING = """
import os, torch

def noting(name, answer):
    real = getattr(torch._C, name, None)
    def ask(*arguments):
        with open({log!r}, "a") as file:
            print(os.getpid(), name, file=file)
        return real(*arguments) if real is not None else answer
    setattr(torch._C, name, ask)

for name, answer in (("_cuda_init", None), ("_cuda_getDeviceCount", 0), ("_cuda_getDevice", 0)):
    noting(name, answer)
"""

CELL = """
import torch, overmind_counting_library, transformers
print(torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized())
"""


def _held(pid: int) -> list[str]:
    found = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return [path for path in found if path.startswith("/dev/nvidia")]


def test_the_zygote_asks_for_no_gpu(runtime: Path, folder: Path, site_packages: Path) -> None:
    log = folder / "asked"
    (site_packages / "overmind_counting_library.py").write_text(COUNTING.format(log=str(log)))
    warm_kernel(runtime, folder, CELL, ENGINES[-1])
    (zygote,) = zygotes(runtime)
    assert has_torch(zygote["pid"])
    with forked_session(runtime, ENGINES[-1]) as running:
        assert running.text(CELL) == "False False\n"
        asked = log.read_text() if log.exists() else ""
        assert f"{zygote['pid']} " not in asked
        assert not _held(zygote["pid"])
        # The counter counts.
        pid, count = running.text("import os\nprint(os.getpid(), torch.cuda.device_count())").split()
        assert int(count) >= 0
        running.text("torch._C._cuda_getDeviceCount()")
        assert f"{pid} _cuda_getDeviceCount" in log.read_text()
    assert not _held(zygote["pid"])


SEEN = """
import ctypes, json, os
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
seen = libc.getenv(b"CUDA_VISIBLE_DEVICES")
print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), "none" if seen is None else seen.decode()]))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_visible_devices(
    runtime: Path, folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the kernelspec's environment, and from a cell before torch is imported."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    warm_kernel(runtime, folder, "import torch", engine)
    with forked_session(runtime, engine) as running:
        assert json.loads(running.text(SEEN)) == [None, "none"]
        cell = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport torch\n"
        reply, outputs = running.run(cell)
        assert reply["status"] == "ok" and outputs[1:] == [], "no warning: torch reads it when it is first used"
        assert json.loads(running.text(SEEN)) == ["", ""]
        assert running.text("print(torch.cuda.is_available(), torch.cuda._is_in_bad_fork())") == "False False\n"
    for value in ("", "0"):
        chosen = {**os.environ, "CUDA_VISIBLE_DEVICES": value}
        with session(kernelspec.argv(engine), zygote=True, env=chosen) as plain:
            assert json.loads(plain.text(SEEN)) == [value, value]
    assert "CUDA" not in capfd.readouterr().err
