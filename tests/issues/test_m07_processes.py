# SPDX-License-Identifier: MIT
"""M07: mapped weights and what people do with processes.

share_memory(), DataLoader workers, os.fork and compiled modules all touch the storages of a model from several
processes. A cache whose child goes on with the parent's socket mixes up two conversations; one whose storages are odd
fails in share_memory or half; one that keeps a reference never gives the mapping back.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle

MODEL = """
import os, torch
path = {path!r}
if not os.path.exists(path):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    torch.save(model, path)
def load():
    return torch.load(path, weights_only=False)
def total(m):
    return float(m[0].weight.sum())
"""


def model(folder: Path) -> str:
    return MODEL.format(path=str(folder / "m.pt"))


def test_shared_memory_is_shared_with_a_child_and_with_nobody_else(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        model(folder)
        + """
m = load()
m.share_memory()
context = torch.multiprocessing.get_context("fork")
def edit(m):
    torch.set_num_threads(1)
    with torch.no_grad():
        m[0].weight.fill_(2.0)
child = context.Process(target=edit, args=(m,))
child.start()
child.join(60)
value = [child.exitcode, total(m), m[0].weight.is_shared(), total(load()), load()[0].weight.is_shared()]
"""
    )
    assert run.value == [0, 2 * 65536.0, True, 65536.0, False]


def test_workers_of_a_data_loader_load_by_themselves(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        model(folder)
        + """
torch.set_num_threads(1)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        m = load()
        m[0].weight.data.add_(index)
        return total(m)
here = load()
loader = torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=2, multiprocessing_context="fork")
value = [float(x) for x in loader] + [total(here), total(load())]
"""
    )
    assert run.value == [65536.0 * (1 + i) for i in range(4)] + [65536.0] * 2


def test_a_fork_has_its_own_connection(oracle: Oracle, folder: Path) -> None:
    """Both sides load at once, thirty times: a shared socket would give one the answer of the other."""
    run = oracle.hit(
        model(folder)
        + """
torch.save([torch.full((100,), 3.0)], path + ".other")
def rounds(path, right):
    for _ in range(30):
        got = torch.load(path, weights_only=False)
        if float(got[0].weight[0, 0] if len(got) == 2 else got[0][0]) != right:
            return 3
    return 0
load()
child = os.fork()
if child == 0:
    code = 4
    try:
        torch.set_num_threads(1)
        code = rounds(path + ".other", 3.0)
    finally:
        os._exit(code)
here = rounds(path, 1.0)
_pid, status = os.waitpid(child, 0)
value = [here, os.waitstatus_to_exitcode(status)]
"""
    )
    assert run.value == [0, 0]


def test_converted_compiled_copied(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        model(folder)
        + """
import copy
x = torch.ones(1, 256)
m = load()
compiled = torch.compile(m, backend="eager")
value = [float(compiled(x)[0, 0])]
half = load().half()
value += [str(half[0].weight.dtype), float(half[0].weight[0, 0])]
twin = copy.deepcopy(m)
twin[0].weight.data.zero_()
value += [total(twin), total(m), total(load())]
scripted = torch.jit.freeze(torch.jit.script(load().eval()))
value.append(float(scripted(x)[0, 0]))
value.append(str(load().to(torch.float64)[1].bias.dtype))
""",
        timeout=240,
    )
    assert run.value == [65793.0, "torch.float16", 1.0, 0.0, 65536.0, 65536.0, 65793.0, "torch.float64"]


RESIZE = """
import os, torch
from safetensors.torch import load_file, save_file
path = {path!r}
if not os.path.exists(path + ".pt"):
    torch.save(torch.arange(4.), path + ".pt")
    save_file({{"x": torch.arange(4.)}}, path + ".safetensors")
value = []
for t in ({loads}):
    value.append(t.untyped_storage().resizable())
    for size in (2, 8):
        try:
            t.resize_(size)
            value.append([list(t.shape), t.untyped_storage().nbytes(), t[:2].tolist()])
        except RuntimeError as error:
            value.append(str(error)[:60])
"""


def test_resizing_a_storage_is_as_native(oracle: Oracle, folder: Path) -> None:
    loads = 'torch.load(path + ".pt"), load_file(path + ".safetensors")["x"]'
    run = oracle.hit(RESIZE.format(path=str(folder / "w"), loads=loads))
    assert run.value[1] == [[2], 16, [0.0, 1.0]]
    run = oracle.by(RESIZE.format(path=str(folder / "w"), loads='torch.load(path + ".pt", mmap=True),'))
    assert run.value[1] == [[2], 16, [0.0, 1.0]]


def test_the_map_goes_with_the_last_tensor(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        model(folder)
        + """
import gc
def maps():
    return sum("memfd:" in line for line in open("/proc/self/maps"))
before = maps()
models = [load() for _ in range(5)]
import overmind
assert not any(r.outcome == "hit" for r in overmind.history()) or maps() > before, "a hit that maps nothing"
kept = models[0][1].bias
del models
gc.collect()
middle = maps()
value = [kept.tolist()]
del kept
gc.collect()
value += [middle - before <= 5, maps() - before]
"""
    )
    assert run.value == [[1.0, 1.0], True, 0]
