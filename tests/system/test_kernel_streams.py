# SPDX-License-Identifier: MIT
"""The same cells sent to ipykernel and to ours: the messages that come back are the same; see kernel_messages.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernel_messages import CELLS, alike, answer
from kernel_sessions import SECONDS, Session, ipykernel, ours

JEDI_CACHE = "__import__('jedi.settings').settings.cache_directory = {!r}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Session]]:
    """ipykernel and ours, each with an IPython folder of its own, both started from the same place."""
    sessions = []
    try:
        for argv in (ipykernel(), ours()):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
                patch.setenv("PYTHONWARNINGS", "default")
                sessions.append(Session(argv))
            # Kernels share parso's files, and one that reads what another just writes completes nothing.
            cache = str(tmp_path_factory.mktemp("jedi"))
            sessions[-1].run(JEDI_CACHE.format(cache), store_history=False)
        yield sessions
    finally:
        for session in sessions:
            session.close()


@pytest.mark.parametrize("name", CELLS)
def test_cell(pair: list[Session], name: str) -> None:
    theirs, mine = (answer(session, CELLS[name], allow_stdin=False) for session in pair)
    assert mine == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"silent": True},
        {"store_history": False},
        {"silent": True, "store_history": True},
        {"user_expressions": {"a": "1 + 1", "b": "no_such", "c": "'x' * 3"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("code", ["print('x'); 5", "1/0", "await asyncio.sleep(0)"])
def test_options(pair: list[Session], code: str, options: dict[str, Any]) -> None:
    theirs, mine = (answer(session, "import asyncio\n" + code, **options) for session in pair)
    assert mine == theirs
    assert answer(pair[0], "1") == answer(pair[1], "1"), "the counters went apart"


TYPES = "_jupyter_types_experimental"

REQUESTS = {
    "kernel_info": lambda client: client.kernel_info(),
    "complete": lambda client: client.complete("import os\nos.path.isd", 20),
    "complete nothing": lambda client: client.complete("no_such_thing_", 14),
    "complete magic": lambda client: client.complete("%who_l", 6),
    "complete without cursor": lambda client: client.complete("zi"),
    "complete in the middle": lambda client: client.complete("pri(1)\nx", 3),
    "complete not ascii": lambda client: client.complete("'\U0001f600'.isal", 8),
    "inspect": lambda client: client.inspect("print", 3),
    "inspect source": lambda client: client.inspect("import textwrap", 15, detail_level=1),
    "inspect nothing": lambda client: client.inspect("no_such", 3),
    "is_complete": lambda client: client.is_complete("def f():"),
    "is_complete yes": lambda client: client.is_complete("1"),
    "is_complete invalid": lambda client: client.is_complete("a = = 1"),
    "history tail": lambda client: client.history(raw=True, output=True, hist_access_type="tail", n=2),
    "history search": lambda client: client.history(hist_access_type="search", pattern="1*1", unique=True),
    "comm_info": lambda client: client.comm_info(),
    "comm_info of one": lambda client: client.comm_info("none.such"),
}


@pytest.mark.parametrize("jedi", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
def test_request(pair: list[Session], name: str, jedi: bool) -> None:
    found = []
    for session in pair:
        session.run(f"%config Completer.use_jedi = {jedi}")
        msg_id = REQUESTS[name](session.client)
        session.outputs(msg_id)
        found.append(alike(session.reply(msg_id)["content"]))
    for one, other in zip(*(content.get("metadata", {}).get(TYPES, []) for content in found), strict=False):
        if "<unknown>" in (one["type"], other["type"]):  # IPython looks for types as long as its time lasts
            one["type"] = other["type"] = one["signature"] = other["signature"] = "<unknown>"
    if name == "kernel_info":
        found[0]["supported_features"].remove("kernel subshells")
    if name.startswith("history"):
        for content in found:
            content["history"] = [entry[1:] for entry in content["history"]]
    assert found[1] == found[0]


def test_display_order_of_keys(pair: list[Session]) -> None:
    """A dictionary's order is part of what the user displays."""
    for session in pair:
        _reply, outputs = session.run("from IPython.display import JSON\nJSON({'z': 1, 'a': 2, 'm': 3})")
        data = outputs[-1]["content"]["data"]["application/json"]
        assert list(data) == ["z", "a", "m"]


@pytest.mark.parametrize("topic", ["", "kernel.", "\u00e9"])
def test_a_subscriber_is_welcomed(pair: list[Session], topic: str) -> None:
    theirs, mine = (welcome(session, topic) for session in pair)
    assert mine == theirs
    assert mine["content"] == {"subscription": topic} and mine["parent_header"] == {}


def welcome(session: Session, topic: str) -> dict[str, Any]:
    """What comes when the client subscribes to this in the place of everything."""
    iopub = session.client.iopub_channel.socket
    found = []
    for old, new in (("", topic), (topic, "")):
        iopub.unsubscribe(old.encode())
        iopub.subscribe(new.encode())
        while (message := session.client.get_iopub_msg(timeout=SECONDS))["msg_type"] != "iopub_welcome":
            continue
        found.append({part: message[part] for part in ("parent_header", "metadata", "content", "buffers")})
    assert found[1]["content"] == {"subscription": ""}
    return found[0]
