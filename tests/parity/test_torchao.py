# SPDX-License-Identifier: MIT
"""Models quantised by torchao; native against cached. torchao is not installed with the other requirements: it says
much in every process that imports diffusers."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import Oracle
from parity.cases import BEFORE, names

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

SETUP = """
import logging, warnings
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import torchao.quantization as ao
import transformers

def facts(m):
    return [[n, type(t).__name__, str(t.dtype), list(t.shape), list(t.stride()), t.requires_grad, t.is_leaf,
             describe(vars(t))] for n, t in m.named_parameters() if type(t) is not torch.nn.Parameter]

def logits(m):
    with torch.no_grad():
        return m.eval()(torch.arange(12).view(2, 6)).logits
"""


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig()", "Int8DynamicActivationInt8WeightConfig()"])
def test_torchao(oracle: Oracle, config: str) -> None:
    """describe(m) would compute with the tensors themselves, which torchao refuses: their parts are compared."""
    body = f"""
config = transformers.TorchAoConfig(ao.{config})
m = transformers.LlamaForCausalLM.from_pretrained(tiny_llama64, quantization_config=config, dtype=torch.bfloat16)
value = [facts(m), repr(m), describe(logits(m)), describe(m.hf_quantizer), describe(m.config), sorted(m.state_dict())]
"""
    oracle.hit(names() + BEFORE + SETUP + body)
