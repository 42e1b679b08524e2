# SPDX-License-Identifier: MIT
"""K09: the environment of whoever came first.

A daemon that loads by itself, or a key without the environment, keeps the first client's HF_HOME, token and offline
switch: the second client, which has another hub cache with other weights under the same repo id, gets the first one's.
Each kernel must see its own; what is missing or forbidden for one is an error there, whatever the other has loaded.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle
from hub import fake_hub
from processes import write_module

COMMIT = "1" * 40

LOAD = """
from transformers import BertForMaskedLM
m = BertForMaskedLM.from_pretrained("o/n")
value = float(m.bert.embeddings.LayerNorm.weight.sum())
"""

# A config is loaded in the same way, in a process that needs not import torch.
FAIL = """
from transformers import BertConfig
try:
    BertConfig.from_pretrained("o/n")
    value = "loaded"
except OSError as error:
    value = type(error).__name__
"""


def test_two_kernels_with_two_hub_caches(oracle: Oracle, folder: Path) -> None:
    oracle.nat(f"""
        import tiny
        root = {str(folder)!r}
        for name, number in (("A", 1.0), ("B", 2.0)):
            tiny.bert(root + "/" + name + ".source", fill=number)
            tiny.hub(root + "/" + name + "/hub", "o/n", {COMMIT!r}, root + "/" + name + ".source")
    """)
    with fake_hub(folder / "A.source", COMMIT, refused_token="refused") as address:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": address}
        first = {"HF_HOME": str(folder / "A"), **online}
        second = {"HF_HOME": str(folder / "B"), "HF_TOKEN": "other", **offline}
        empty = {"HF_HOME": str(folder / "C"), **offline}
        refused = {"HF_HOME": str(folder / "D"), "HF_TOKEN": "refused", **online}
        run = oracle._fresh.interpreter
        for environment, right in ((first, 16.0), (second, 32.0), (second, 32.0)):
            seen = run(LOAD, env=environment)
            assert seen.value == right, f"with HF_HOME={environment['HF_HOME']}"
        assert seen.outcomes == ["hit"], seen.reasons
        for environment in (empty, refused):
            assert run(FAIL, on=False, env=environment).value == "OSError"
            assert run(FAIL, env=environment).value == "OSError"


def test_variables_are_read_when_the_load_runs(oracle: Oracle, folder: Path) -> None:
    """A loader that reads the environment: the entry of one setting is not the answer for the other."""
    write_module(
        folder / "mylib.py",
        "import os, torch\ndef load(path):\n    return [torch.load(path).tolist(), os.environ.get('HF_MINE')]\n",
    )
    source = f"""
        import os, sys, torch, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        path = {str(folder / "w.pt")!r}
        if not os.path.exists(path):
            torch.save(torch.arange(2.), path)
        value = []
        for setting in ("one", "two", None):
            os.environ.pop("HF_MINE", None)
            if setting:
                os.environ["HF_MINE"] = setting
            value.append(overmind.load(mylib.load, path))
    """
    assert oracle.by(source).value == [[[0.0, 1.0], "one"], [[0.0, 1.0], "two"], [[0.0, 1.0], None]]
