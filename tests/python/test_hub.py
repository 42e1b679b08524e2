# SPDX-License-Identifier: MIT
"""Which commit a repository's name stands for, in caches built by hand; there is no network here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from overmind import hub, key
from overmind.encoding import Uncacheable
from overmind.loader import Loader
from transformers import BertConfig, BertForMaskedLM

ONE = "1" * 40
TWO = "2" * 40
MODEL = Loader(
    name="transformers.PreTrainedModel.from_pretrained",
    target="pretrained_model_name_or_path",
    hub=True,
    libraries=("transformers", "torch"),
)


def snapshot(cache: Path, commit: str, size: int, repo: str = "o/n") -> Path:
    """A cache as huggingface_hub 2.4 lays it out: blobs, and links to them."""
    storage = cache / f"models--{repo.replace('/', '--')}"
    (storage / "blobs").mkdir(parents=True, exist_ok=True)
    (storage / "refs").mkdir(exist_ok=True)
    folder = storage / "snapshots" / commit
    folder.mkdir(parents=True)
    made = cache / f"made-{commit}"
    torch.manual_seed(size)
    config = BertConfig(
        hidden_size=size, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(made)
    for file in made.iterdir():
        blob = storage / "blobs" / f"{commit[:8]}-{file.name}"
        file.rename(blob)
        (folder / file.name).symlink_to(f"../../blobs/{blob.name}")
    return storage


def point(storage: Path, revision: str, commit: str) -> None:
    (storage / "refs" / revision).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    point(snapshot(tmp_path, ONE, 8), "main", ONE)
    snapshot(tmp_path, TWO, 16)
    return tmp_path


def native_commit(**kwargs: Any) -> str:
    """What a native load reads: told by the width of the model."""
    model = BertForMaskedLM.from_pretrained("o/n", **kwargs)
    return {8: ONE, 16: TWO}[model.config.hidden_size]


def request(**kwargs: Any) -> key.Request:
    return key.make_request(MODEL, BertForMaskedLM.from_pretrained, ("o/n",), kwargs, BertForMaskedLM)


def commit_of(**kwargs: Any) -> str:
    snapshot = request(**kwargs).snapshot
    assert snapshot is not None
    return snapshot.commit


def test_k04_a_branch_is_resolved_now(cache: Path) -> None:
    first = request().key
    assert commit_of() == ONE == native_commit()
    point(cache / "models--o--n", "main", TWO)
    assert commit_of() == TWO == native_commit()
    assert request().key != first
    point(cache / "models--o--n", "main", ONE)
    assert request().key == first


@pytest.mark.parametrize("revision", ["main", ONE, TWO, "v1"])
def test_k04_revisions_are_what_the_native_load_reads(cache: Path, revision: str) -> None:
    point(cache / "models--o--n", "v1", TWO)
    assert commit_of(revision=revision) == native_commit(revision=revision)
    assert commit_of(revision=revision, local_files_only=True) == native_commit(revision=revision)


def test_the_snapshot_is_a_folder_to_watch(cache: Path) -> None:
    assert request().folders == [str(cache / "models--o--n" / "snapshots" / ONE)]


def test_a_cache_dir_that_is_given_is_the_one_that_counts(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    point(snapshot(other, TWO, 16), "main", TWO)
    assert commit_of(cache_dir=str(other)) == TWO == native_commit(cache_dir=str(other))
    assert commit_of(cache_dir=other) == TWO
    assert request(cache_dir=str(other)).key != request(revision=TWO).key


def test_a_folder_of_that_name_comes_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.mktemp("cwd")
    (here / "o" / "n").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert request().snapshot is None
    assert request().folders == [str(here / "o" / "n")]


@pytest.mark.parametrize(
    "name", ["o/missing", "a/b/c", "https://host/x", "~/m", "./missing", "/nope", "", "o/n ", "-o/n", "o/n--x", "x\0y"]
)
def test_what_can_not_be_resolved_is_left_to_the_native_load(cache: Path, name: str) -> None:
    with pytest.raises(Uncacheable):
        key.make_request(MODEL, BertForMaskedLM.from_pretrained, (name,), {}, BertForMaskedLM)
    with pytest.raises((OSError, ValueError)):
        BertForMaskedLM.from_pretrained(name)


def test_a_revision_that_is_not_there_is_left_to_the_native_load(cache: Path) -> None:
    with pytest.raises(Uncacheable, match="not in the local cache"):
        request(revision="other")
    with pytest.raises(OSError):
        native_commit(revision="other")


@pytest.mark.parametrize("ref", ["", "../../..", "\n"])
def test_a_ref_that_holds_no_commit_is_refused(cache: Path, ref: str) -> None:
    point(cache / "models--o--n", "main", ref)
    with pytest.raises(Uncacheable):
        request()


class Hub:
    """The hub's side of one call, where there is no network: what HfApi would ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
        import huggingface_hub

        self.asked: list[str] = []

        def repo_info(_api: object, repo_id: str, **_rest: Any) -> Any:
            self.asked.append(repo_id)
            if isinstance(answer, Exception):
                raise answer
            return type("Info", (), {"sha": answer})()

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)


def test_online_the_hub_is_asked_and_a_local_ref_is_not_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Hub(monkeypatch, TWO)
    assert commit_of() == TWO
    assert asked.asked == ["o/n"]
    assert commit_of(revision=ONE) == ONE
    assert commit_of(local_files_only=True) == TWO  # the answer was noted in refs, as natively
    assert asked.asked == ["o/n"]


def test_a_hub_that_can_not_be_reached_leaves_the_local_ref(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2

    Hub(monkeypatch, httpx2.ConnectError("no network"))
    assert commit_of() == ONE


def test_any_other_failure_is_left_to_the_native_load(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, RuntimeError("refused"))
    with pytest.raises(Uncacheable, match="RuntimeError"):
        request()


def test_k09_another_token_is_another_key_online(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, ONE)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "one")
    first = request().key
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "two")
    assert request().key != first


def test_snapshots_are_told_by_their_paths() -> None:
    assert hub.repository_of(f"/c/models--o--n/snapshots/{ONE}/unet/config.json") == ("/c/models--o--n", ONE)
    assert hub.repository_of(f"/c/models/snapshots/{ONE}/config.json") is None
    assert hub.repository_of("/c/models--o--n/refs/main") is None
