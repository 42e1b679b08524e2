# SPDX-License-Identifier: MIT
"""R02: one map or one descriptor for every tensor.

torch's own sharing takes a descriptor, or a map, a tensor: a large state dict runs into "Too many open files" or into
the kernel's limit of 65,530 maps, and a subprocess that inherits the descriptors keeps the memory alive. An entry is
one segment: one map while it is used, no descriptor after the load.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle
from processes import write_module

COUNTS = """
import gc, os
def maps():
    return len(open("/proc/self/maps").readlines())
def fds():
    return len(os.listdir("/proc/self/fd"))
"""


def test_seventy_thousand_tensors(oracle: Oracle, folder: Path) -> None:
    """Each with a storage of its own. Built by a loader, because torch.load takes 15 s for as many."""
    write_module(
        folder / "mylib.py",
        "import torch\ndef load(path):\n    return {str(i): t.clone() for i, t in enumerate(torch.load(path))}\n",
    )
    run = oracle.hit(
        COUNTS
        + f"""
import sys, torch, overmind
sys.path.insert(0, {str(folder)!r})
import mylib
path = {str(folder / "w.pt")!r}
if not os.path.exists(path):
    torch.save(torch.arange(70_000)[:, None], path)
before = maps(), fds()
d = overmind.load(mylib.load, path)
value = [len(d), int(sum(v.sum() for v in d.values())), len({{v.untyped_storage().data_ptr() for v in d.values()}})]
assert maps() - before[0] < 500, maps() - before[0]
assert fds() - before[1] < 5, fds() - before[1]
d["3"][0] = 9
value.append([int(d["2"]), int(d["3"]), int(d["4"]), d["5"].untyped_storage().nbytes()])
""",
        timeout=240,
    )
    assert run.value == [70_000, 70_000 * 69_999 // 2, 70_000, [2, 9, 4, 8]]


def test_fifty_rounds_with_sixty_four_descriptors(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        COUNTS
        + f"""
import resource, torch
path = {str(folder / "w.pt")!r}
if not os.path.exists(path):
    torch.save([torch.full((3000,), float(i)) for i in range(200)], path)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
torch.load(path)
gc.collect()
before = maps(), fds()
value = []
for _ in range(50):
    loaded = torch.load(path)
    value.append(float(sum(t[0] for t in loaded)))
    del loaded
gc.collect()
assert maps() - before[0] < 20 and fds() - before[1] < 3, (before, maps(), fds())
"""
    )
    assert run.value == [199 * 100.0] * 50


def test_a_subprocess_of_a_cell_gets_no_memfd(oracle: Oracle, folder: Path) -> None:
    """Held objects, and a load in flight in another thread: nothing of either shows in a child."""
    run = oracle.by(f"""
        import os, subprocess, sys, threading, torch
        path = {str(folder / "w.pt")!r}
        if not os.path.exists(path):
            torch.save(torch.zeros(2_000_000), path)
        held = [torch.load(path) for _ in range(3)]
        stop = threading.Event()
        def loads():
            while not stop.is_set():
                torch.load(path)
        thread = threading.Thread(target=loads)
        thread.start()
        look = "import os\\nfor f in os.listdir('/proc/self/fd'):\\n" \\
               " try: print(os.readlink('/proc/self/fd/' + f))\\n except OSError: pass"
        found = []
        for _ in range(5):
            command = [sys.executable, "-S", "-E", "-c", look]
            done = subprocess.run(command, close_fds=False, capture_output=True, text=True)
            found += [line for line in done.stdout.splitlines() if "memfd" in line or "socket" in line]
        stop.set()
        thread.join()
        value = [found, float(held[2].sum())]
    """)
    assert run.value == [[], 0.0]
