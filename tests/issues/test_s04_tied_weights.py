# SPDX-License-Identifier: MIT
"""S04: tied weights come back as two tensors.

In a masked language model the decoder and the word embeddings are one Parameter. A cache that stores tensors by name
makes two of it: training moves them apart, resizing grows only one, and the saved file is larger than the native one.
Measured natively on transformers 5.24: the two attributes are one object.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = f"root = {str(folder)!r}\n{BEFORE}\n"
    oracle.nat(
        start
        + """
import tiny
tiny.bert(root + "/m", seed=1)
tiny.bert(root + "/untied", seed=1, tie_word_embeddings=False)
"""
    )
    return start + "import os, shutil\nfrom describe import folder_bytes\nfrom transformers import BertForMaskedLM\n"


LOAD = """
m = BertForMaskedLM.from_pretrained(root + "/m")
A = m.cls.predictions.decoder.weight
B = m.bert.embeddings.word_embeddings.weight
"""


def test_one_parameter_and_one_storage(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + LOAD
        + """
value = [A is B, A.data_ptr() == B.data_ptr(), A.untyped_storage().nbytes(), list(A.shape),
         m.cls.predictions.decoder.bias is m.cls.predictions.bias, len(list(m.parameters())), len(m.state_dict())]
"""
    )
    assert run.value[:4] == [True, True, 32 * 16 * 4, [32, 16]]
    assert run.value[4] is True


def test_an_edit_of_the_embeddings_reaches_the_decoder(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + LOAD
        + """
ids = torch.tensor([[1, 2, 3]])
was = m(input_ids=ids).logits
with torch.no_grad():
    B[5].fill_(9.0)
value = [A[5].tolist(), bool((m(input_ids=ids).logits[..., 5] != was[..., 5]).all())]
"""
    )
    assert run.value == [[9.0] * 16, True]


def test_a_resize_keeps_the_tie(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + LOAD
        + """
torch.manual_seed(0)
m.resize_token_embeddings(40)
A = m.cls.predictions.decoder.weight
B = m.bert.embeddings.word_embeddings.weight
with torch.no_grad():
    B[39].fill_(3.0)
value = [A is B, list(A.shape), A[39].tolist(), list(m.cls.predictions.bias.shape), m.config.vocab_size,
         list(m(input_ids=torch.tensor([[39]])).logits.shape)]
"""
    )
    assert run.value == [True, [40, 16], [3.0] * 16, [40], 40, [1, 1, 40]]


def test_saved_bytes_are_the_native_ones(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + LOAD
        + """
out = root + "/out"
shutil.rmtree(out, ignore_errors=True)
m.save_pretrained(out)
from safetensors import safe_open
value = [folder_bytes(out), os.path.getsize(out + "/model.safetensors"),
         os.path.getsize(root + "/m/model.safetensors"), sorted(safe_open(out + "/model.safetensors", "pt").keys())]
"""
    )
    _bytes, size, original, names = run.value
    assert size == original
    assert not any("decoder.weight" in name for name in names)


def test_training_keeps_them_together(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + LOAD
        + """
m.eval()
ids = torch.tensor([[1, 2, 3]])
step = torch.optim.SGD(m.parameters(), lr=0.1)
m(input_ids=ids, labels=ids).loss.backward()
value = [A.grad is B.grad, describe(A.grad)]
step.step()
value += [torch.equal(A, B), describe(A)]
"""
    )
    assert run.value[0] is True and run.value[2] is True


def test_untied_stays_untied(oracle: Oracle, before: str) -> None:
    """The reverse fault: equal bytes are no tie."""
    run = oracle.hit(
        before
        + LOAD.replace("/m", "/untied")
        + """
with torch.no_grad():
    B.fill_(1.0)
value = [A is B, A.data_ptr() == B.data_ptr(), bool((A == 1).all()), len(list(m.parameters()))]
"""
    )
    assert run.value[:3] == [False, False, False]
