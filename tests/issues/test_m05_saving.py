# SPDX-License-Identifier: MIT
"""M05: a small tensor that drags the whole arena along.

`torch.save` writes the storage of a tensor, not the tensor: of a view into a 4 MB arena it writes 4 MB (measured), and
pickling, deep copies and safetensors' check for shared memory see the arena too. Every tensor must have a storage of
its own, exactly as large as the native one.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle


def test_sizes_of_everything_that_is_saved(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(f"""
        import copy, os, pickle, torch
        from safetensors.torch import save_file
        root = {str(folder)!r}
        path = root + "/w.pt"
        if not os.path.exists(path):
            odd = torch.ones(3, dtype=torch.uint8)
            torch.save({{"big": torch.zeros(1_000_000), "x": torch.arange(10.), "odd": odd}}, path)
        d = torch.load(path)
        torch.save(d["x"], root + "/x.pt")
        save_file({{"x": d["x"], "odd": d["odd"]}}, root + "/x.safetensors")
        save_file(d, root + "/all.safetensors")
        value = {{
            "save": os.path.getsize(root + "/x.pt"),
            "save_file": os.path.getsize(root + "/x.safetensors"),
            "all": os.path.getsize(root + "/all.safetensors"),
            "pickle": len(pickle.dumps(d["x"])),
            "storages": [t.untyped_storage().nbytes() for t in d.values()],
            "copies": [t.untyped_storage().nbytes() for t in copy.deepcopy(d).values()],
            "offsets": [t.storage_offset() for t in d.values()],
            "distinct": len({{t.untyped_storage().data_ptr() for t in d.values()}}),
        }}
    """)
    assert run.value["storages"] == run.value["copies"] == [4_000_000, 40, 3]
    assert run.value["offsets"] == [0, 0, 0] and run.value["distinct"] == 3
    assert run.value["save"] < 2_500 and run.value["pickle"] < 1_500
    assert run.value["save_file"] < 300 and 4_000_043 < run.value["all"] < 4_000_400


def test_save_pretrained_writes_the_native_bytes(oracle: Oracle, folder: Path) -> None:
    oracle.nat(f"import tiny; tiny.bert({str(folder / 'm')!r}, seed=1)")
    run = oracle.hit(f"""
        import copy, os, shutil, torch
        from describe import folder_bytes
        from transformers import BertForMaskedLM
        out = {str(folder / "saved")!r}
        shutil.rmtree(out, ignore_errors=True)
        m = BertForMaskedLM.from_pretrained({str(folder / "m")!r})
        m.save_pretrained(out + "/whole")
        m.save_pretrained(out + "/shards", max_shard_size="10KB")
        copy.deepcopy(m).save_pretrained(out + "/copy")
        torch.save(m.state_dict(), out + "/state.pt")
        single = m.state_dict()["bert.embeddings.LayerNorm.weight"]
        torch.save(single, out + "/single.pt")
        value = [folder_bytes(out), os.path.getsize(out + "/whole/model.safetensors"),
                 os.path.getsize(out + "/single.pt"), single.untyped_storage().nbytes()]
    """)
    files, whole, single, storage = run.value
    assert files["whole/model.safetensors"] == files["copy/model.safetensors"]
    assert whole < 50_000 and single < 2_500 and storage == 64
