# SPDX-License-Identifier: MIT
"""M08: where mapped storages begin, and how long they live.

Tensors that follow an odd number of bytes start at odd addresses: vector instructions fault or slow down. And a tensor
over a mapping that somebody else closes is a segmentation fault at the next read: `torch.frombuffer` does not hold the
map (measured). The map must go with the last tensor made from it, whatever happens to the model, to the client, to the
entry and to the daemon.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle


def test_every_storage_is_aligned(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(f"""
        import os, torch, overmind
        path = {str(folder / "w.pt")!r}
        if not os.path.exists(path):
            state = {{}}
            for i in range(1, 40):
                state["byte%d" % i] = torch.arange(i % 256, dtype=torch.uint8)[: i | 1]
                state["float%d" % i] = torch.arange(float(i))
                state["double%d" % i] = torch.arange(float(i), dtype=torch.float64)
                state["half%d" % i] = torch.arange(i).half()
                state["complex%d" % i] = torch.arange(i).to(torch.complex64)
            torch.save({{k: v.clone() for k, v in state.items()}}, path)
        d = torch.load(path)
        value = [len(d), {{k: str(v.sum().item()) for k, v in d.items()}}]
        if any(r.outcome == "hit" for r in overmind.history()):
            assert all(t.data_ptr() % 64 == 0 for t in d.values()), {{k: t.data_ptr() % 64 for k, t in d.items()}}
    """)
    assert run.value[0] == 195 and run.value[1]["float4"] == "6.0"


def test_one_weight_outlives_everything(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(f"""
        import gc, os, torch, overmind
        path = {str(folder / "m.pt")!r}
        if not os.path.exists(path):
            m = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
            torch.nn.init.constant_(m[0].weight, 2.0)
            torch.save(m, path)
        def maps():
            return sum("memfd:" in line for line in open("/proc/self/maps"))
        before = maps()
        m = torch.load(path, weights_only=False)
        weight = m[0].weight
        view = weight.detach()[100:, ::2]
        array = weight.detach().numpy()
        del m
        gc.collect()
        value = [float(weight.sum())]
        if any(r.outcome == "hit" for r in overmind.history()):
            from overmind import store
            store.client().drop_all()
            value.append(float(weight.sum()))
            store.client().stop()
            store.reset()
        else:
            value.append(float(weight.sum()))
        gc.collect()
        value.append(float(weight.sum()))
        weight.data.add_(1)
        del weight
        gc.collect()
        value += [float(view.sum()), float(array.sum())]
        del view
        gc.collect()
        value.append(float(array[-1, -1]))
        del array
        gc.collect()
        value.append(maps() - before)
    """)
    total = 512 * 512
    assert run.value == [2.0 * total] * 3 + [3.0 * 412 * 256, 3.0 * total, 3.0, 0]
