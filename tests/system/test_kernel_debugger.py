# SPDX-License-Identifier: MIT
"""The debugger through the messages that JupyterLab sends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from kernel_sessions import SECONDS, Session, ipykernel, ours, session

CODE = "def f(x):\n    y = x + 1\n    return y\n\n\nf(41)"


@pytest.fixture
def running() -> Iterator[Session]:
    with session(ours()) as one:
        yield one


_sequence = count(1)


def ask(running: Session, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    request = {"type": "request", "seq": next(_sequence), "command": command, "arguments": arguments or {}}
    message = running.client.session.msg("debug_request", request)
    running.client.control_channel.send(message)
    return running.reply(message["header"]["msg_id"], "control")["content"]


def event(running: Session, name: str) -> dict[str, Any]:
    while True:
        message = running.client.get_iopub_msg(timeout=SECONDS)
        if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
            return message["content"]


def attach(running: Session) -> None:
    arguments = {
        "clientID": "test",
        "adapterID": "",
        "pathFormat": "path",
        "linesStartAt1": True,
        "columnsStartAt1": True,
    }
    assert ask(running, "initialize", arguments)["success"]
    assert ask(running, "attach", {"justMyCode": True})["success"]


def test_a_breakpoint_in_a_cell(running: Session) -> None:
    assert not ask(running, "debugInfo")["body"]["isStarted"]
    attach(running)
    path = ask(running, "dumpCell", {"code": CODE})["body"]["sourcePath"]
    arguments = {"source": {"path": path}, "breakpoints": [{"line": 3}], "sourceModified": False}
    (breakpoint,) = ask(running, "setBreakpoints", arguments)["body"]["breakpoints"]
    assert breakpoint["verified"]
    ask(running, "configurationDone")
    msg_id = running.send(CODE)
    stopped = event(running, "stopped")
    thread = stopped["body"]["threadId"]
    info = ask(running, "debugInfo")["body"]
    assert info["isStarted"] and info["stoppedThreads"] == [thread]
    frames = ask(running, "stackTrace", {"threadId": thread})["body"]["stackFrames"]
    assert [(frame["name"], frame["line"]) for frame in frames[:2]] == [("f", 3), ("<module>", 6)]
    assert frames[0]["source"]["path"] == path
    scopes = ask(running, "scopes", {"frameId": frames[0]["id"]})["body"]["scopes"]
    variables = ask(running, "variables", {"variablesReference": scopes[0]["variablesReference"]})["body"]["variables"]
    assert {one["name"]: one["value"] for one in variables} == {"x": "41", "y": "42"}
    ask(running, "next", {"threadId": thread})
    event(running, "stopped")
    ask(running, "continue", {"threadId": thread})
    assert running.reply(msg_id)["content"]["status"] == "ok"
    assert ask(running, "disconnect", {"restart": False, "terminateDebuggee": False})["success"]
    assert running.text("print(1)") == "1\n"
    attach(running)  # and again
    ask(running, "disconnect", {"restart": False, "terminateDebuggee": False})


def test_variables_without_a_breakpoint(running: Session) -> None:
    running.run("a = 5\nb = 'text'")
    attach(running)
    variables = ask(running, "inspectVariables")["body"]["variables"]
    assert {"a": "5", "b": "'text'"}.items() <= {one["name"]: one["value"] for one in variables}.items()
    rich = ask(running, "richInspectVariables", {"variableName": "a"})["body"]
    assert rich["data"]["text/plain"] == "5"


def test_debug_info_before_the_start_equals_ipykernels(running: Session) -> None:
    with session(ipykernel()) as theirs:
        bodies = [ask(one, "debugInfo")["body"] for one in (running, theirs)]
    for body in bodies:
        assert "ipykernel_" in body.pop("tmpFilePrefix")
    assert bodies[0] == bodies[1]
