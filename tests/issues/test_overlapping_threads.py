# SPDX-License-Identifier: MIT
"""transformers sets torch's default dtype for the whole process while it loads: what loads meanwhile is not kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from processes import write_module

LIBRARY = """
import torch
before = None
def layer(n):
    if before is not None:
        before()
    return torch.nn.LayerNorm(n)
"""

START = """
import sys, threading, time
import torch, overmind
from safetensors.torch import load_file
from transformers import BertForMaskedLM
root = {root!r}
sys.path.insert(0, root)
import mylib
"""

# A load that is never kept, again and again in another thread, until the one here is done.
OTHER = """
from transformers import BertConfig
config = BertConfig.from_pretrained(root + "/m")
states = torch.load(root + "/w.pt")
stop = threading.Event()
def others():
    while not stop.is_set():
        BertForMaskedLM.from_pretrained(None, config=config, state_dict=states, dtype=torch.bfloat16)
thread = threading.Thread(target=others)
def until_it_is_set():
    thread.start()
    deadline = time.monotonic() + 60
    while torch.get_default_dtype() is not torch.bfloat16:
        assert time.monotonic() < deadline
"""

LOAD = """
layer = overmind.load(mylib.layer, 3)
value = str(layer.weight.dtype)
"""


@pytest.fixture
def start(oracle: Oracle, folder: Path) -> str:
    write_module(folder / "mylib.py", LIBRARY)
    oracle.nat(f"""
        import tiny, torch
        from transformers import BertForMaskedLM
        root = {str(folder)!r}
        tiny.bert(root + "/m", fill=1.0)
        torch.save(BertForMaskedLM.from_pretrained(root + "/m").state_dict(), root + "/w.pt")
    """)
    return START.format(root=str(folder))


def test_a_load_beside_one_of_a_model_is_not_kept(oracle: Oracle, start: str) -> None:
    beside = oracle.run(start + OTHER + "mylib.before = until_it_is_set\n" + LOAD + "stop.set()\nthread.join()\n")
    assert beside.value == "torch.bfloat16", "as natively"
    record = next(record for record in beside.records if record[2] == "mylib.layer")
    assert record[0] == "bypass" and "another thread" in record[1]
    alone = oracle.run(start + LOAD)
    assert alone.value == "torch.float32" and alone.records[-1][0] == "miss"
    assert oracle.run(start + LOAD).records[-1][0] == "hit"


def test_loads_that_change_nothing_may_overlap(oracle: Oracle, start: str) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
barrier = threading.Barrier(2, timeout=60)
first = torch.serialization._open_zipfile_reader.__init__
def together(self, *args):
    barrier.wait()
    first(self, *args)
torch.serialization._open_zipfile_reader.__init__ = together
with ThreadPoolExecutor(2) as pool:
    list(pool.map(torch.load, [root + "/w.pt", root + "/v.pt"]))
value = None
"""
    oracle.nat(start + "import shutil\nshutil.copy(root + '/w.pt', root + '/v.pt')\nvalue = None")
    assert [record[0] for record in oracle.run(start + program).records] == ["miss", "miss"]
