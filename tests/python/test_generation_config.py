# SPDX-License-Identifier: MIT
"""A restored GenerationConfig knows whether it was changed since it was loaded, as a native one does."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
from transformers import GenerationConfig
config = GenerationConfig.from_pretrained({folder!r})
unchanged = config._original_object_hash == hash(config)
try:
    config.save_pretrained({out!r})
    saved = "saved"
except ValueError as error:
    saved = "refused"
config.top_k = 7
value = [unchanged, saved, config._original_object_hash == hash(config)]
"""


@pytest.mark.parametrize("seeds", [("1", "2"), ("random", "random")])
def test_an_unchanged_config_can_be_saved(runtime: Path, tmp_path: Path, fresh: Any, seeds: tuple[str, str]) -> None:
    """The hash goes over strings: only interpreters with seeds of their own show that it was kept."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    source = textwrap.dedent(SOURCE.format(folder=str(folder), out=str(tmp_path / "out")))
    native = fresh.interpreter(source, on=False, env={"PYTHONHASHSEED": seeds[0]})
    assert native.value == [True, "saved", False]
    for seed in seeds:
        run = fresh.interpreter(source, env={"PYTHONHASHSEED": seed})
        assert run.value == native.value
    assert run.outcomes == ["hit"], run.reasons


def test_a_pickled_config_keeps_the_number_of_its_file(runtime: Path, tmp_path: Path, fresh: Any) -> None:
    file = str(tmp_path / "config.pt")
    write = f"""
import torch
from transformers import GenerationConfig
config = GenerationConfig()
config._original_object_hash = hash(config)
torch.save(config, {file!r})
value = 0
"""
    read = f"import torch\nvalue = torch.load({file!r}, weights_only=False)._original_object_hash"
    fresh.interpreter(write, on=False, env={"PYTHONHASHSEED": "1"})
    native = fresh.interpreter(read, on=False, env={"PYTHONHASHSEED": "2"})
    for seed in ("3", "4"):
        run = fresh.interpreter(read, env={"PYTHONHASHSEED": seed})
        assert run.value == native.value
    assert run.outcomes == ["hit"], run.reasons
