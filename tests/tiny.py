# SPDX-License-Identifier: MIT
"""The smallest models that a loader takes, written by a run of its own: `tiny.bert(folder, seed=1)`.

Imported by the sources that tests run in fresh processes, never by a test itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def bert(folder: str, seed: int = 0, fill: float | None = None, cls: Any = None, **config: Any) -> None:
    """A one-layer BERT below 50 kB. With `fill` every weight is that number. `cls` is the class, if another."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "max_position_embeddings": 16,
    }
    model = (cls or BertForMaskedLM)(BertConfig(**{**small, **config}))
    if fill is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(fill)
    model.save_pretrained(folder)


def tokenizer(folder: str) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)


def hub(cache: str, repo: str, commit: str, source: str, branch: str = "main") -> None:
    """Puts the files of `source` into a hub cache as `commit` of `repo`, and points the branch at it."""
    import hashlib

    root = Path(cache) / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in Path(source).iterdir():
        data = file.read_bytes()
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        os.symlink(f"../../blobs/{blob.name}", snapshot / file.name)
    (root / "refs" / branch).write_text(commit)
