# SPDX-License-Identifier: MIT
"""S07: quantised tensors and dynamically quantised modules.

A quantised tensor carries a quantizer (scheme, scales, zero points) beside its bytes. A cache whose tensor reducer
looks only at dtype, shape and storage loses it, or dies in an internal assertion of torch. Dynamically quantised
modules keep their weights packed in a C++ object that has no storage at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = f"root = {str(folder)!r}\n{BEFORE}\nimport warnings\nwarnings.simplefilter('ignore')\n"
    oracle.nat(
        start
        + """
from torch import nn
torch.manual_seed(0)
x = torch.tensor([-1.0, 0.0, 0.5, 2.0])
torch.save(torch.quantize_per_tensor(x, 0.1, 10, torch.qint8), root + "/tensor.pt")
torch.save(
    torch.quantize_per_channel(x.reshape(2, 2), torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([1, 2]), 0,
                               torch.quint8), root + "/channel.pt")
q = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 0, torch.qint32)
torch.save([q, q[2:4], q.reshape(2, 3).t()], root + "/views.pt")
net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3)).eval()
torch.save(torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8), root + "/net.pt")
lstm = nn.Sequential(nn.LSTM(3, 4)).eval()
torch.save(torch.ao.quantization.quantize_dynamic(lstm, {nn.LSTM}, torch.qint8), root + "/lstm.pt")
"""
    )
    return start


def test_per_tensor(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
t = torch.load(root + "/tensor.pt")
value = [t.q_scale(), t.q_zero_point(), t.int_repr().tolist(), t.dequantize().tolist(), str(t.dtype), str(t.qscheme())]
t[0] = 1.0
value.append(t.dequantize()[0].item())
"""
    )
    assert run.value[:3] == [0.1, 10, [0, 10, 15, 30]]
    assert run.value[4:6] == ["torch.qint8", "torch.per_tensor_affine"]
    assert run.value[6] == pytest.approx(1.0)


def test_per_channel_and_views(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
c = torch.load(root + "/channel.pt")
v = torch.load(root + "/views.pt")
value = [c.q_per_channel_scales().tolist(), c.q_per_channel_zero_points().tolist(), c.q_per_channel_axis(),
         c.int_repr().tolist(), [list(t.stride()) for t in v], [t.storage_offset() for t in v]]
v[0][2] = 50.0
value.append([t.dequantize().tolist() for t in v])
"""
    )
    assert run.value[0] == [0.1, 0.2] and run.value[1] == [1, 2] and run.value[2] == 0
    assert run.value[4] == [[1], [1], [1, 3]] and run.value[5] == [0, 2, 0]
    assert run.value[6][1] == [50.0, 3.0], "the view sees the write"


@pytest.mark.parametrize("name, shape", [("net", "1, 4"), ("lstm", "2, 1, 3")])
def test_dynamically_quantised_modules(oracle: Oracle, before: str, name: str, shape: str) -> None:
    run = oracle.by(
        before
        + f"""
m = torch.load(root + "/{name}.pt", weights_only=False)
out = m(torch.ones({shape}))
value = [describe(out[0]), [type(part).__module__ + "." + type(part).__name__ for part in m.modules()],
         sorted(m.state_dict()),
         m.training]
again = torch.load(root + "/{name}.pt", weights_only=False)
value.append(describe(again(torch.ones({shape}))[0]))
"""
    )
    assert any(".quantized.dynamic." in part for part in run.value[1])
    assert run.value[0] == run.value[4]


def test_the_user_may_save_it_again(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
import io
t = torch.load(root + "/tensor.pt")
torch.save(t, root + "/again.pt")
back = torch.load(io.BytesIO(open(root + "/again.pt", "rb").read()))
value = [back.q_scale(), back.int_repr().tolist()]
"""
    )
    assert run.value == [0.1, [0, 10, 15, 30]]
