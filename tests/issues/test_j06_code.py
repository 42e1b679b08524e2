# SPDX-License-Identifier: MIT
"""J06: edited code, and patches that came too early or too late.

A pickled object of a class that was edited since comes back as the old class, or as the new one without what its new
`__init__` sets; after `%autoreload` it is no instance of what the notebook calls Net. A patch misses who wrote
`from torch import load` before it, changes signatures that other libraries inspect, or imports torch to patch it.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle
from processes import write_module

MODULE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        {more}
    def forward(self, x):
        return self.weight * x
def build(path):
    net = Net()
    net.load_state_dict(torch.load(path))
    return net
"""

USE = """
import os, pickle, sys, torch, overmind
sys.path.insert(0, {root!r})
import mymod
path = {root!r} + "/w.pt"
if not os.path.exists(path):
    torch.save({{"weight": torch.full((3,), 4.0)}}, path)
m = overmind.load(mymod.build, path)
value = [isinstance(m, mymod.Net), type(m) is mymod.Net, m.weight.tolist(), getattr(m, "new", None),
         pickle.loads(pickle.dumps(m)).weight.tolist(), m(2).tolist()]
"""


def test_an_edited_class_after_a_restart(oracle: Oracle, folder: Path) -> None:
    source = USE.format(root=str(folder))
    old = [True, True, [4.0] * 3, None, [4.0] * 3, [8.0] * 3]
    new = [True, True, [4.0] * 3, 1, [4.0] * 3, [8.0] * 3]
    write_module(folder / "mymod.py", MODULE.format(more=""))
    assert oracle.by(source).value == old
    write_module(folder / "mymod.py", MODULE.format(more="self.new = 1"))
    run = oracle.run(source)
    assert run.value == new and run.outcomes != ["hit"]
    assert oracle.by(source).value == new


def test_a_whole_model_whose_class_was_edited(oracle: Oracle, folder: Path) -> None:
    """torch.load of a pickled module: its methods are the new ones, its attributes those of the file."""
    write_module(folder / "mymod.py", MODULE.format(more=""))
    source = f"""
        import os, sys, torch
        sys.path.insert(0, {str(folder)!r})
        import mymod
        path = {str(folder / "net.pt")!r}
        if not os.path.exists(path):
            torch.save(mymod.Net(), path)
        m = torch.load(path, weights_only=False)
        value = [type(m) is mymod.Net, m(2).tolist(), m(2).dtype == torch.float64]
    """
    assert oracle.by(source).value == [True, [2.0] * 3, False]
    text = MODULE.format(more="").replace("self.weight * x", "self.weight.double() * x * 10")
    write_module(folder / "mymod.py", text)
    assert oracle.run(source).value == [True, [20.0] * 3, True]
    assert oracle.by(source).value == [True, [20.0] * 3, True]


NOTEBOOK = """
import os, pickle, sys
from IPython.core.interactiveshell import InteractiveShell
root = {root!r}
sys.path.insert(0, root)
ip = InteractiveShell.instance()
def cell(code):
    result = ip.run_cell(code)
    result.raise_error()
{extension}
cell("%load_ext autoreload")
cell("%autoreload 2")
cell("import mymod, torch, overmind")
cell("import os; there = os.path.exists('{root}/w.pt')")
cell("there or torch.save(dict(weight=torch.full((3,), 4.0)), '{root}/w.pt')")
cell("first = overmind.load(mymod.build, '{root}/w.pt')")
text = open(root + "/mymod.py").read()
with open(root + "/mymod.py", "w") as file:
    file.write(text.replace("torch.ones(3))", "torch.ones(3)); self.new = 1"))
later = os.stat(root + "/mymod.py").st_mtime + 2
os.utime(root + "/mymod.py", (later, later))
cell("second = overmind.load(mymod.build, '{root}/w.pt')")
cell("import pickle; copy = pickle.loads(pickle.dumps(second))")
cell("value = [isinstance(second, mymod.Net), getattr(first, 'new', None), second.new, copy.new]")
cell("value.append(second.weight.tolist())")
value = ip.user_ns["value"]
with open(root + "/mymod.py", "w") as file:
    file.write(text)
"""


def test_autoreload(oracle: Oracle, folder: Path) -> None:
    right = [True, None, 1, 1, [4.0] * 3]
    write_module(folder / "mymod.py", MODULE.format(more=""))
    assert oracle.nat(NOTEBOOK.format(root=str(folder), extension="")).value == right
    with_extension = NOTEBOOK.format(root=str(folder), extension='cell("%load_ext overmind")')
    for _ in range(2):
        assert oracle.run(with_extension).value == right


def test_a_class_cell_run_again(oracle: Oracle, folder: Path) -> None:
    """Net of the notebook, edited and run again: what was saved as Net comes back as the present Net."""
    run = oracle.by(f"""
        import os, torch
        path = {str(folder / "net.pt")!r}
        value = []
        for factor in (1, 10):
            class Net(torch.nn.Module):
                by = factor
                def forward(self, x):
                    return x * self.by
            torch.save(Net(), path)
            for _ in range(2):
                m = torch.load(path, weights_only=False)
                value.append([type(m) is Net, m(2)])
    """)
    assert run.value == [[True, 2], [True, 2], [True, 20], [True, 20]]


def test_names_imported_before_overmind(oracle: Oracle, folder: Path) -> None:
    """`from torch import load` first: loads are right, whether or not the cache sees them."""
    path = str(folder / "w.pt")
    oracle.nat(f"import torch\ntorch.save(torch.arange(3.), {path!r})")
    source = f"""
        from torch import load
        from safetensors.torch import load_file
        from transformers import BertForMaskedLM
        bound = BertForMaskedLM.from_pretrained
        import overmind, torch
        overmind.enable()
        value = [load({path!r}).tolist(), torch.load({path!r}).tolist(), load.__name__]
        value += [callable(load_file), callable(bound)]
    """
    for _ in range(2):
        run = oracle._fresh.run(source, on=False)
        assert run.value == [[0.0, 1.0, 2.0]] * 2 + ["load", True, True]
        assert len(run.records) >= 1
    assert run.outcomes[-1] == "hit"


def test_libraries_imported_after_overmind(oracle: Oracle, folder: Path) -> None:
    """enable() first: each import is watched, and its loaders are wrapped as soon as it is done."""
    path = str(folder / "w")
    oracle.nat(f"""
        import torch
        from safetensors.torch import save_file
        torch.save(torch.arange(3.), {path + ".pt"!r})
        save_file({{"x": torch.arange(3.)}}, {path + ".safetensors"!r})
    """)
    source = f"""
        from torch import load
        from safetensors.torch import load_file
        value = [load({path + ".pt"!r}).tolist(), load_file({path + ".safetensors"!r})["x"].tolist()]
    """
    for outcome in ("miss", "hit"):
        run = oracle._fresh.interpreter(source)
        assert run.value == [[0.0, 1.0, 2.0]] * 2
        assert run.outcomes == [outcome] * 2


SIGNATURES = """
import inspect, json, diffusers, torch, transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertModel, PreTrainedModel, pipeline
found = {
    "torch.load": torch.load, "load_file": load_file, "PreTrainedModel": PreTrainedModel.from_pretrained,
    "BertModel": BertModel.from_pretrained, "AutoModel": AutoModel.from_pretrained,
    "AutoTokenizer": AutoTokenizer.from_pretrained, "pipeline": pipeline,
    "ModelMixin": diffusers.ModelMixin.from_pretrained,
    "DiffusionPipeline": diffusers.DiffusionPipeline.from_pretrained,
}
value = {
    name: [str(inspect.signature(f)), f.__doc__, f.__name__, f.__qualname__, f.__module__, inspect.ismethod(f),
           inspect.getsourcefile(inspect.unwrap(f))]
    for name, f in found.items()
}
"""


def test_signatures_and_docs_stay(oracle: Oracle) -> None:
    native = oracle.nat(SIGNATURES)
    assert oracle.run(SIGNATURES + "\nassert torch.load.__wrapped__ is not torch.load\n").value == native.value
    undone = oracle.run(
        "import overmind\novermind.disable()\n" + SIGNATURES + "assert not hasattr(torch.load, '__wrapped__')"
    )
    assert undone.value == native.value


def test_the_extension_imports_no_library(oracle: Oracle) -> None:
    run = oracle._fresh.interpreter(
        """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        ip = InteractiveShell.instance()
        before = set(sys.modules)
        ip.run_line_magic("load_ext", "overmind")
        heavy = {"torch", "transformers", "diffusers", "safetensors", "numpy", "rich", "click", "huggingface_hub"}
        value = sorted(heavy & (set(sys.modules) - before))
        """,
        on=False,
    )
    assert run.value == []
