# SPDX-License-Identifier: MIT
"""M01: a write into shared weights is seen by everybody.

When a cache hands out views of one shared memory, an in-place operation, an optimizer step, a write through numpy or
the running statistics of a BatchNorm change the weights of every other process, and of the cache itself: the next load,
even in a fresh kernel, is the changed model.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle, wait_for
from processes import Process

WEIGHTS = """
import os, torch
path = {path!r}
if not os.path.exists(path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    torch.save(model, path)
from describe import describe
def load():
    return torch.load(path, weights_only=False)
"""

# Each leaves the model of this process changed.
WRITES = """
def add(m):
    with torch.no_grad():
        m[0].weight.add_(7)
def step(m):
    m.train()
    optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
    m(torch.arange(256.).reshape(4, 64)).square().sum().backward()
    optimizer.step()
def through_numpy(m):
    m[0].weight.detach().numpy()[:] = 5
def statistics(m):
    m.train()
    m(torch.arange(256.).reshape(4, 64))
def data(m):
    m[0].weight.data.zero_()
def load_state(m):
    m.load_state_dict({k: torch.full_like(v, 3) for k, v in m.state_dict().items()})
def raw(m):
    import ctypes
    ctypes.memset(m[0].weight.data_ptr(), 0, m[0].weight.nbytes)
writes = [add, step, through_numpy, statistics, data, load_state, raw]
"""


def test_every_load_is_the_file(oracle: Oracle, folder: Path) -> None:
    """Written to, then loaded again in the same process, in every way; the first load of the next is original too."""
    run = oracle.hit(
        WEIGHTS.format(path=str(folder / "m.pt"))
        + WRITES
        + """
original = load()
first = describe(original)
kept = load()
value = [float(original[0].weight.sum()), first]
for write in writes:
    m = load()
    assert describe(m) == first, write.__name__ + " was seen by the next load"
    write(m)
    changed = describe(m) != first
    value.append([write.__name__, changed, describe(load()) == first, describe(kept) == first])
"""
    )
    assert run.value[0] == 64 * 64.0
    assert run.value[2:] == [
        [name, True, True, True] for name in ("add", "step", "through_numpy", "statistics", "data", "load_state", "raw")
    ]


def test_a_kernel_beside_sees_nothing(oracle: Oracle, folder: Path) -> None:
    """Kernel A holds its changed weights while kernel B loads."""
    source = WEIGHTS.format(path=str(folder / "m.pt"))
    total = source + "value = float(load()[0].weight.sum())"
    oracle.hit(total)
    oracle._fresh.interpreter(total)  # a new interpreter has fewer of torch's safe globals, so another key
    changed, done = folder / "changed", folder / "done"
    waits = f"""
import time
m = load()
with torch.no_grad():
    m[0].weight.add_(7)
open({str(changed)!r}, "w").close()
deadline = time.monotonic() + 60
while not os.path.exists({str(done)!r}) and time.monotonic() < deadline:
    time.sleep(0.01)
value = [float(m[0].weight.sum()), float(load()[0].weight.sum())]
"""
    with Process(source + waits) as first:
        wait_for(changed.exists, 60, "kernel A has written")
        beside = oracle.run(total)
        done.touch()
        run = first.result()
    assert beside.value == 64 * 64.0 and beside.outcomes == ["hit"]
    assert run.value == [64 * 64 * 8.0, 64 * 64.0] and run.outcomes == ["hit", "hit"]


def test_the_bytes_of_the_cache_do_not_change(oracle: Oracle, folder: Path) -> None:
    """What the daemon holds, read by a process that loads nothing, before and after."""
    source = WEIGHTS.format(path=str(folder / "m.pt"))
    oracle.nat(source)  # what was written just before a load is not kept
    first = oracle.run(source + "value = float(load()[0].weight.sum())")
    digest = f"""
        import hashlib
        from overmind import store
        segment = store.client().open({first.records[0][3]!r})
        parts = [segment.meta, segment.skeleton, segment.tensors]
        parts += [segment.buffer(i) for i in range(segment.buffer_count)]
        value = [hashlib.sha256(part).hexdigest() for part in parts]
    """
    before = oracle.run(digest)
    writing = oracle.run(source + WRITES + "for write in writes:\n    write(load())\n")
    assert set(writing.outcomes) == {"hit"}
    assert oracle.run(digest).value == before.value
    assert len(before.value) > 3


def test_the_object_of_the_first_load_is_apart_from_the_cache(oracle: Oracle, folder: Path) -> None:
    """The snapshot is taken of the object as it was loaded, however soon the user writes to it."""
    source = WEIGHTS.format(path=str(folder / "m.pt"))
    oracle.nat(source)  # what was written just before a load is not kept
    run = oracle.run(source + "m = load()\nm[0].weight.data.add_(7)\nvalue = float(m[0].weight.sum())")
    assert run.value == 64 * 64 * 8.0 and run.outcomes == ["miss"]
    run = oracle.run(source + "value = float(load()[0].weight.sum())")
    assert run.value == 64 * 64.0 and run.outcomes == ["hit"]
