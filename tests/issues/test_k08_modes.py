# SPDX-License-Identifier: MIT
"""K08: torch's ambient modes: an entry made in one mode, asked for in another.

`torch.device`, `inference_mode` and the default dtype change what a load returns without being among its arguments. A
cache that ignores them gives a CPU model where the native load raises, tensors that can't be trained, or a dtype that
was the default of somebody else; one that rebuilds tensors inside the caller's mode marks weights that the native load
does not mark.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle
from processes import write_module


def prepared(oracle: Oracle, folder: Path) -> None:
    """The files, and every entry of a plain process cached."""
    oracle.nat(f"""
        import tiny, torch
        from safetensors.torch import save_file
        root = {str(folder)!r}
        tiny.bert(root + "/m", fill=1.0)
        torch.save({{"x": torch.arange(4.)}}, root + "/w.pt")
        save_file({{"x": torch.arange(4.)}}, root + "/w.safetensors")
    """)
    write_module(folder / "mylib.py", "import torch\ndef load(n):\n    return torch.nn.LayerNorm(n)\n")
    oracle.hit(loads(folder) + "value = [str(a['x'].device), str(b['x'].device), str(m.device), str(n.weight.dtype)]")


def loads(folder: Path, indent: str = "") -> str:
    lines = f"""
import sys, torch, overmind
from safetensors.torch import load_file
from transformers import BertForMaskedLM
root = {str(folder)!r}
sys.path.insert(0, root)
import mylib
from describe import describe
{{mode}}
{indent}a = torch.load(root + "/w.pt")
{indent}b = load_file(root + "/w.safetensors")
{indent}m = BertForMaskedLM.from_pretrained(root + "/m")
{indent}n = overmind.load(mylib.load, 3)
"""
    return lines.format(mode="") if not indent else lines


def test_the_meta_device(oracle: Oracle, folder: Path) -> None:
    prepared(oracle, folder)
    run = oracle.by(f"""
        import torch
        from safetensors.torch import load_file
        from transformers import BertForMaskedLM
        root = {str(folder)!r}
        with torch.device("meta"):
            value = [str(torch.load(root + "/w.pt")["x"].device), str(load_file(root + "/w.safetensors")["x"].device)]
            try:
                value.append(str(BertForMaskedLM.from_pretrained(root + "/m").device))
            except RuntimeError as error:
                value.append(str(error)[:34])
    """)
    assert run.value == ["cpu", "cpu", "You are using `from_pretrained` wi"]


def test_inference_mode(oracle: Oracle, folder: Path) -> None:
    prepared(oracle, folder)
    source = (
        loads(folder, "    ").format(mode="with torch.inference_mode():")
        + "value = [a['x'].is_inference(), b['x'].is_inference(), m.bert.embeddings.LayerNorm.weight.is_inference()]\n"
        + "value += [n.weight.is_inference(), describe(m.state_dict(keep_vars=True)), describe([a, b])]\n"
    )
    assert oracle.by(source).value[:4] == [True, True, False, True]


def test_an_entry_made_in_inference_mode_is_not_given_outside(oracle: Oracle, folder: Path) -> None:
    oracle.nat(f"import tiny; tiny.bert({str(folder / 'm')!r}, fill=1.0)")
    load = f"m = BertForMaskedLM.from_pretrained({str(folder / 'm')!r})"
    head = "import torch\nfrom describe import describe\nfrom transformers import BertForMaskedLM\n"
    oracle.run(head + f"with torch.inference_mode():\n    {load}\n")
    run = oracle.hit(
        head
        + load
        + "\nvalue = [any(p.is_inference() for p in m.parameters()), any(b.is_inference() for b in m.buffers())]\n"
        + "m(torch.arange(4)[None]).logits.sum().backward()\n"
        + "value.append(all(p.grad is not None for n, p in m.named_parameters() if 'LayerNorm' in n))\n"
    )
    assert run.value == [False, False, True]


def test_the_default_dtype(oracle: Oracle, folder: Path) -> None:
    prepared(oracle, folder)
    source = loads(folder) + "value = [str(n.weight.dtype), str(a['x'].dtype), str(m.dtype)]"
    assert oracle.by(source).value == ["torch.float32"] * 3
    run = oracle.by("import torch\ntorch.set_default_dtype(torch.float64)\n" + source)
    assert run.value[:2] == ["torch.float64", "torch.float32"]
    assert run.value[2] == oracle.nat("import torch\ntorch.set_default_dtype(torch.float64)\n" + source).value[2]


def test_the_default_device(oracle: Oracle, folder: Path) -> None:
    prepared(oracle, folder)
    source = f"""
        import sys, torch, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        torch.set_default_device("meta")
        value = [str(overmind.load(mylib.load, 3).weight.device), str(torch.load({str(folder / "w.pt")!r})["x"].device)]
    """
    assert oracle.by(source).value == ["meta", "cpu"]


def test_no_grad_round_a_loader_that_builds(oracle: Oracle, folder: Path) -> None:
    write_module(folder / "mylib.py", "import torch\ndef load():\n    return torch.ones(2, requires_grad=True) * 2\n")
    source = f"""
        import sys, torch, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        with torch.set_grad_enabled({{mode}}):
            value = overmind.load(mylib.load).requires_grad
    """
    for mode in (False, True, False):
        assert oracle.by(source.format(mode=mode)).value is mode


def test_spellings_of_a_dtype(oracle: Oracle, folder: Path) -> None:
    prepared(oracle, folder)
    run = oracle.hit(f"""
        import torch
        from transformers import BertForMaskedLM
        half = BertForMaskedLM.from_pretrained({str(folder / "m")!r}, dtype="float16")
        load = BertForMaskedLM.from_pretrained
        path = {str(folder / "m")!r}
        value = [str(load(path, dtype="float16").dtype), str(load(path, dtype=torch.float16).dtype),
                 str(load(path, torch_dtype=torch.float16).dtype), str(load(path, dtype="auto").dtype),
                 str(load(path).dtype)]
    """)
    assert run.value == ["torch.float16"] * 3 + ["torch.float32"] * 2


def test_auto_follows_what_the_checkpoint_holds(oracle: Oracle, folder: Path) -> None:
    path = str(folder / "half")
    oracle.nat(f"""
        import tiny, torch
        from transformers import BertForMaskedLM
        tiny.bert({path!r}, fill=1.0)
        BertForMaskedLM.from_pretrained({path!r}).half().save_pretrained({path!r})
    """)
    run = oracle.hit(f"""
        from transformers import BertForMaskedLM
        value = [str(BertForMaskedLM.from_pretrained({path!r}, dtype=d).dtype) for d in ("auto", "float32", "float16")]
    """)
    assert run.value == ["torch.float16", "torch.float32", "torch.float16"]


def test_weights_that_are_not_initialised_or_not_tied(oracle: Oracle, folder: Path) -> None:
    """transformers' own contexts, round a load: what one makes is not what another outside makes."""
    prepared(oracle, folder)
    load = (
        loads(folder).partition("\na = ")[0]
        + "\nimport contextlib\nfrom transformers import initialization\nwith {}:\n"
        + "    n = overmind.load(mylib.load, {})\n"
        + "    m = BertForMaskedLM.from_pretrained(root + '/m')\n"
        + "value = [{}, m.cls.predictions.decoder.weight.device.type]\n"
    )
    plain = "contextlib.nullcontext()"
    ones = "n.weight.tolist() == [1.0] * len(n.weight)"  # anything, where it is not initialised
    for size, context, device in ((3, "no_init_weights", "cpu"), (4, "no_tie_weights", "meta")):
        inside = oracle.by(load.format(f"initialization.{context}()", size, "None"))
        assert [record[0] for record in inside.records if "Config" not in record[2]] == ["bypass"] * 2, inside.records
        assert all(context in record[1] for record in inside.records if "Config" not in record[2])
        assert inside.value[1] == device
        for _ in range(2):
            assert oracle.run(load.format(plain, size, ones)).value == [True, "cpu"]
