# SPDX-License-Identifier: MIT
"""torch.load: state dicts, whole modules, nested objects, formats and options; native against cached."""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

MAKE = """
import collections, datetime, io
import numpy as np
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
net[0].weight.requires_grad_(False)
torch.save(net.state_dict(), made + "/state.pt")
torch.save(net, made + "/module.pt")
torch.save(net.train(), made + "/training.pt")
torch.save(net.state_dict(), made + "/legacy.pt", _use_new_zipfile_serialization=False)
adam = torch.optim.Adam(net.parameters())
net(torch.randn(2, 3, 8, 8)).sum().backward()
adam.step()
torch.save({"net": net.state_dict(), "adam": adam.state_dict(), "epoch": 3, "loss": 0.25, "note": "x"},
           made + "/trained.pt")
shared = torch.arange(6.0)
torch.save(
    [{"a": [torch.ones(2), (torch.zeros(()), None)], 3: {"b": shared}}, shared, "text", 2.5, 1 << 70, b"x" * 9,
     torch.Size([2, 3]), torch.float16, torch.device("cpu"), collections.OrderedDict(z=1), {1, 2}],
    made + "/nested.pt",
)
kinds = {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype)
         for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                       torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
                       torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)}
torch.save({**kinds, "empty": torch.empty(0, 3), "scalar": torch.tensor(7), "transposed": torch.ones(2, 3).t(),
            "last": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
            "conj": torch.tensor([1 + 2j]).conj(), "leaf": torch.ones(2, requires_grad=True),
            "parameter": nn.Parameter(torch.ones(3), requires_grad=False)}, made + "/kinds.pt")
torch.save([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()], made + "/sparse.pt")
torch.save(torch.empty(3, 2, device="meta"), made + "/meta.pt")
torch.save({"array": np.arange(5000.0).reshape(50, 100).T, "when": datetime.date(2020, 1, 2), "named": np.float32(2)},
           made + "/objects.pt")
lazy = nn.LSTM(3, 4, num_layers=2)
torch.save(lazy, made + "/lstm.pt")
torch.save(nn.TransformerEncoderLayer(8, 2, 16), made + "/transformer.pt")
torch.save(torch.arange(300_000.0), made + "/large.pt")
"""

RUN = "m(torch.ones(2, 3, 8, 8))"

LOADS = [
    Load("state_dict", "torch.load(made + '/state.pt')", "list(m)"),
    Load("state_dict_metadata", "torch.load(made + '/state.pt')._metadata"),
    Load("positional", "torch.load(made + '/state.pt', 'cpu', weights_only=True)"),
    Load("module", "torch.load(made + '/module.pt', weights_only=False)", RUN),
    Load("module_training", "torch.load(made + '/training.pt', weights_only=False)", RUN),
    Load("module_lstm", "torch.load(made + '/lstm.pt', weights_only=False)", "m(torch.ones(2, 1, 3))"),
    Load("module_attention", "torch.load(made + '/transformer.pt', weights_only=False)",
         "m.eval()(torch.ones(2, 1, 8))"),
    Load("legacy_format", "torch.load(made + '/legacy.pt')"),
    Load("optimiser", "torch.load(made + '/trained.pt')"),
    Load("nested", "torch.load(made + '/nested.pt')", "[m[1] is m[0][3]['b'], m[0]['a'][1][1]]"),
    Load("kinds", "torch.load(made + '/kinds.pt')"),
    Load("mmap", "torch.load(made + '/state.pt', mmap=True)", bypass="the native load reads nothing"),
    Load("mmap_large", "torch.load(made + '/large.pt', mmap=True, weights_only=True)", "m.sum()",
         bypass="the native load reads nothing"),
    Load("large", "torch.load(made + '/large.pt')", "m.sum()"),
    Load("map_name", "torch.load(made + '/state.pt', map_location='cpu')"),
    Load("map_device", "torch.load(made + '/state.pt', map_location=torch.device('cpu'))"),
    Load("map_table", "torch.load(made + '/state.pt', map_location={'cuda:0': 'cpu'})"),
    Load("map_meta", "torch.load(made + '/state.pt', map_location='meta')", bypass="a meta tensor has no bytes"),
    Load("path_object", "torch.load(pathlib.Path(made) / 'state.pt')", setup="import pathlib"),
    Load("objects", "torch.load(made + '/objects.pt', weights_only=False)"),
    Load("own_pickle_module", "torch.load(made + '/objects.pt', weights_only=False, pickle_module=pickle)",
         setup="import pickle", bypass="a module is an argument: its code may be anybody's"),
    Load("through_serialization", "torch.serialization.load(made + '/state.pt')"),
    Load("through_a_copy", "copied(made + '/state.pt')", setup="from torch import load as copied"),
    Load("sparse", "torch.load(made + '/sparse.pt')", "[t.to_dense() for t in m]",
         bypass="sparse tensors may stay in the pickle or be refused"),
    Load("meta", "torch.load(made + '/meta.pt')", bypass="a meta tensor has no bytes"),
    Load("map_function", "torch.load(made + '/state.pt', map_location=lambda storage, place: storage)",
         bypass="a lambda may do anything"),
    Load("open_file", "torch.load(file)", "file.tell()", "file = open(made + '/state.pt', 'rb')",
         bypass="an open file is not a name"),
    Load("own_bytes", "torch.load(io.BytesIO(open(made + '/state.pt', 'rb').read()))", setup="import io",
         bypass="bytes in memory are not a file"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(fresh, tmp_path_factory.mktemp("torch"), MAKE)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_torch(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load, made)
