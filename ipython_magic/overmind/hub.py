# SPDX-License-Identifier: MIT
"""Which commit of a repository a native load would read now.

A key holds the commit, never "main". Resolved on the client at every call, the way huggingface_hub (read at 2.4) does
it: a full hash stands for itself; offline, refs/<revision> in the cache is read; online, the hub is asked, and the
cache is the fallback only if the hub can't be reached.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from overmind.encoding import Uncacheable

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository and where it lies in the local cache."""

    commit: str
    folder: str
    """snapshots/<commit>; may not exist yet."""
    storage: str
    """models--owner--name, which holds blobs, refs and snapshots."""
    credentials: bytes
    """Digest of the token that is sent with requests; empty offline."""


def resolve(repo: str, arguments: dict[str, Any]) -> Snapshot:
    """The snapshot that a load of `repo` with these arguments reads. Uncacheable if that can't be told."""
    if _REPO.fullmatch(repo) is None or "--" in repo or ".." in repo or len(repo) > 96:
        raise Uncacheable(f"{repo!r} is neither a file or folder nor the name of a repository")
    constants = _constants()
    revision = arguments.get("revision")
    revision = getattr(revision, "resolved", revision)
    if revision is not None and type(revision) is not str:
        raise Uncacheable(f"revision is a {type(revision).__qualname__}")
    cache = arguments.get("cache_dir")
    storage = _storage(repo, constants.HF_HUB_CACHE if cache is None else cache)
    offline = bool(arguments.get("local_files_only")) or bool(constants.HF_HUB_OFFLINE)
    token = arguments.get("token", arguments.get("use_auth_token"))
    if revision is not None and _COMMIT.fullmatch(revision):
        commit = revision
    elif offline:
        commit = _local(storage, revision or "main", repo)
    else:
        commit = _ask(repo, revision, cache, token)
    credentials = b"" if offline else _credentials(token)
    return Snapshot(commit, os.path.join(storage, "snapshots", commit), storage, credentials)


def _constants() -> Any:
    """Not from the environment: huggingface_hub reads that once, at its import, and native loads see that."""
    try:
        from huggingface_hub import constants
    except ImportError:
        raise Uncacheable("huggingface_hub is not installed, so a repository can't be resolved") from None
    return constants


def _storage(repo: str, cache: Any) -> str:
    if not isinstance(cache, (str, os.PathLike)):
        raise Uncacheable(f"cache_dir is a {type(cache).__qualname__}")
    return os.path.join(os.path.abspath(os.path.expanduser(os.fspath(cache))), f"models--{repo.replace('/', '--')}")


def _local(storage: str, revision: str, repo: str) -> str:
    try:
        with open(os.path.join(storage, "refs", revision)) as file:
            commit = file.read()
    except (OSError, ValueError):
        raise Uncacheable(f"{repo!r} at {revision!r} is not in the local cache, and the hub is not asked") from None
    if commit.strip() != commit or commit in ("", ".", "..") or "/" in commit:
        raise Uncacheable(f"refs/{revision} of {repo!r} holds no commit")
    return commit


def _ask(repo: str, revision: str | None, cache: Any, token: Any) -> str:
    from huggingface_hub import HfApi

    try:
        found = HfApi().resolve_revision(repo, revision=revision, cache_dir=cache, token=token)
    except Exception as error:  # any failure is the native load's to report, or to recover from
        raise Uncacheable(f"{repo!r} can't be resolved on the hub ({type(error).__name__})") from None
    commit = getattr(found, "resolved", None)
    if not isinstance(commit, str):
        raise Uncacheable(f"the hub gave no commit for {repo!r}")
    return commit


def _credentials(token: Any) -> bytes:
    if isinstance(token, str):
        secret: str | None = token
    elif token is False:
        secret = None
    else:
        from huggingface_hub import get_token

        secret = get_token()
    return b"" if secret is None else hashlib.sha256(secret.encode()).digest()


def online(arguments: dict[str, Any]) -> bool:
    """True if a load with these arguments may ask the hub."""
    constants = sys.modules.get("huggingface_hub.constants")
    return not arguments.get("local_files_only") and not bool(getattr(constants, "HF_HUB_OFFLINE", False))


def repository_of(path: str) -> tuple[str, str] | None:
    """(storage folder, commit) if `path` lies in a snapshot of a hub cache."""
    head, found, tail = path.partition("/snapshots/")
    if not found or not os.path.basename(head).startswith(("models--", "datasets--", "spaces--")):
        return None
    return head, tail.partition("/")[0]
