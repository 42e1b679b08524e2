# SPDX-License-Identifier: MIT
"""Each request gets exactly one reply, wherever an interrupt or another signal falls."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from kernel_sessions import SECONDS, Session, ours, session
from overmind.kernel import interrupts

SWEEP = """
import signal, sys

class Sweep:
    '''Interrupts a request where Python itself looks for signals: when a function of Python's begins, and when one of
    C's has returned. `places` are the different ones that a request of this kind came through.'''
    signum = signal.SIGINT
    wanted = None
    places = []

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_return"):
            return
        back = frame.f_back
        place = (event, frame.f_code.co_filename, frame.f_lineno, getattr(arg, "__qualname__", ""),
                 back and (back.f_code.co_filename, back.f_lineno))
        if self.wanted is None:
            self.places.append(place)
        elif place == self.wanted:
            sys.setprofile(None)
            signal.raise_signal(self.signum)

sweep = Sweep()
kernel = get_ipython().kernel
plain = type(kernel)._handle

async def handle(self, request):
    at = request.metadata.get("interrupt")
    if at is not None:
        sweep.wanted = sweep.places[at] if at >= 0 else None
        sys.setprofile(sweep)
    try:
        await plain(self, request)
    finally:
        if at is not None:
            sys.setprofile(None)
            sweep.places = list(dict.fromkeys(sweep.places))

type(kernel)._handle = handle
from comm import create_comm
comm = create_comm(target_name="t", comm_id="swept")
comm.on_msg(lambda message: str(message))
"""

CELL = {"silent": False, "store_history": True, "allow_stdin": True, "stop_on_error": False}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cell": ("execute_request", {**CELL, "code": "print(1)\n1", "user_expressions": {"two": "1 + 1"}}),
    "cell that awaits": ("execute_request", {**CELL, "code": "import asyncio\nawait asyncio.sleep(0)\n1"}),
    "inspect": ("inspect_request", {"code": "no_such_name", "cursor_pos": 3, "detail_level": 0}),
    "history": ("history_request", {"hist_access_type": "tail", "n": 3, "raw": True, "output": False}),
    "is_complete": ("is_complete_request", {"code": "for x in y:"}),
    "comm_info": ("comm_info_request", {}),
    "kernel_info": ("kernel_info_request", {}),
    "comm message": ("comm_msg", {"comm_id": "swept", "data": 1}),
    "unknown": ("strange_request", {}),
}


def ask(running: Session, kind: str, content: dict[str, Any], interrupt: int) -> tuple[list[str], list[str]]:
    """Sends a request that is interrupted at the place of this number (-1: they are noted); its states on iopub and
    the types of its replies, as far as they came."""
    message = running.client.session.msg(kind, content, metadata={"interrupt": interrupt})
    running.client.shell_channel.send(message)
    msg_id = message["header"]["msg_id"]
    last = running.client.kernel_info()  # answered after every reply of the request before
    states: list[str] = []
    replies: list[str] = []
    try:
        while (reply := running.client.get_shell_msg(timeout=SECONDS / 4))["parent_header"]["msg_id"] != last:
            assert reply["parent_header"]["msg_id"] == msg_id
            replies.append(reply["msg_type"])
        for each in (msg_id, last):
            for output in running.outputs(each):
                if each == msg_id and output["msg_type"] == "status":
                    states.append(output["content"]["execution_state"])
    except queue.Empty:
        replies.append("the kernel hangs")
    return states, replies


@pytest.mark.parametrize("name", REQUESTS)
def test_an_interrupt_at_any_place(name: str) -> None:
    kind, content = REQUESTS[name]
    expected = ["busy", "idle"], [] if kind == "comm_msg" else [kind.replace("_request", "_reply")]
    with session(ours(), stderr=subprocess.DEVNULL) as running:
        assert running.run(SWEEP)[0]["status"] == "ok"
        assert ask(running, kind, content, -1) == expected
        places = int(running.text("print(len(sweep.places))"))
        assert places > 20, "it does not see the kernel at work"
        for number in range(places):
            found = ask(running, kind, content, number)
            assert found == expected, f"place {number} of {places}"
        assert running.text("print('alive')") == "alive\n"


@pytest.mark.parametrize("name", ["cell", "comm_info"])
def test_an_alarm_in_the_kernels_own_code(name: str) -> None:
    """What the user's own handlers raise comes wherever the kernel is. Such a request may fail, but with one reply."""
    kind, content = REQUESTS[name]
    with session(ours(), stderr=subprocess.DEVNULL) as running:
        running.run(SWEEP)
        running.run("def late(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)")
        running.run("sweep.signum = signal.SIGALRM")
        assert ask(running, kind, content, -1)[1] == [kind.replace("_request", "_reply")]
        numbers = "[n for n, place in enumerate(sweep.places) if 'overmind/kernel/' in place[1]]"
        places = json.loads(running.text(f"print({numbers})"))
        assert len(places) > 10, "it does not see the kernel at work"
        for number in places:
            _states, replies = ask(running, kind, content, number)
            assert replies == [kind.replace("_request", "_reply")], f"place {number} of {places}"


class InterruptAt:
    """Interrupts where the n-th function of Python's begins, or of C's has returned."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def test_interrupts_end_with_the_users_code() -> None:
    """However one falls, none is left for what comes after: two in a row would else reach the kernel's own code."""
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts.disarm()
        for number in range(1, 100):
            hook = InterruptAt(number)
            sys.setprofile(hook)
            with contextlib.suppress(KeyboardInterrupt):
                interrupts.armed(lambda: int("1"))
            sys.setprofile(None)
            assert signal.getsignal(signal.SIGINT) is interrupts.nothing, f"after place {number}"
            if hook.left > 0:
                break
        assert number > 3, "nothing was interrupted"
    finally:
        signal.signal(signal.SIGINT, before)


# Other signals, and exceptions of every kind.


@contextlib.contextmanager
def storm(pid: int) -> Iterator[None]:
    """Interrupts, some in every step of a request."""
    code = f"import os, signal, time\nwhile True:\n    os.kill({pid}, signal.SIGINT)\n    time.sleep(1e-4)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as sender:
        try:
            yield
        finally:
            sender.terminate()


def replies_to_cells(running: Session, number: int) -> Counter[str]:
    """The statuses of the replies to cells that are sent one after the other."""
    found: Counter[str] = Counter()
    for _ in range(number):
        # It sleeps for longer than ZeroMQ goes without a look at its mailbox, where a signal disturbs it.
        msg_id = running.send("import time\ntime.sleep(0.002)", stop_on_error=False)
        reply = running.client.get_shell_msg(timeout=SECONDS / 4)
        assert reply["parent_header"]["msg_id"] == msg_id
        states = [one["content"]["execution_state"] for one in running.outputs(msg_id) if one["msg_type"] == "status"]
        assert states == ["busy", "idle"]
        found[reply["content"]["status"]] += 1
    return found


def test_a_storm_of_interrupts() -> None:
    with session(ours(), stderr=subprocess.DEVNULL) as running:
        with storm(running.manager.provisioner.pid):
            found = replies_to_cells(running, 300)
        assert sum(found.values()) == 300
        assert found["error"] > 0, "no interrupt came to a cell"
        assert running.text("print('alive')") == "alive\n"


def test_a_timer_of_the_users() -> None:
    """As a profiler's: it has nothing to do with the kernel, and cells must not fail for it."""
    with session(ours()) as running:
        running.run("import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)")
        running.run("signal.setitimer(signal.ITIMER_REAL, 5e-5, 5e-5)")
        assert replies_to_cells(running, 300) == {"ok": 300}


def test_interrupt_of_a_cell_that_awaits_after_a_comm_message() -> None:
    with session(ours()) as running:
        running.run("import asyncio\nfrom comm import create_comm\nc = create_comm(target_name='t', comm_id='c')")
        running.run("handled = asyncio.Event()\nc.on_msg(lambda message: handled.set())")
        # Said outside of the handler: an interrupt that comes within it is the handler's.
        say = "async def say():\n    await handled.wait()\n    print('handled', flush=True)"
        begin = "said = asyncio.ensure_future(say())\nprint('begun', flush=True)\nawait asyncio.sleep(100)"
        msg_id = running.send(f"{say}\n{begin}")
        running.outputs(msg_id, lambda one: one["msg_type"] == "stream")
        message = running.client.session.msg("comm_msg", {"comm_id": "c", "data": 1})
        running.client.shell_channel.send(message)
        running.outputs(msg_id, lambda one: one["msg_type"] == "stream")
        running.manager.interrupt_kernel()
        assert running.reply(msg_id)["content"]["ename"] == "CancelledError"


NESTED = """
import asyncio, signal, sys, time
from asyncio import tasks
loop, task = asyncio.get_running_loop(), asyncio.current_task()

def interrupt(frame, event, arg):
    if event == "c_return" and getattr(arg, "__name__", "") == "receive":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

input("send the next one")
tasks._leave_task(loop, task)
sys.setprofile(interrupt)
try:
    while sys.getprofile():
        loop.call_soon(int)
        loop._run_once()
finally:
    sys.setprofile(None)
    tasks._enter_task(loop, task)
"""


def test_interrupt_while_a_cell_runs_the_loop() -> None:
    """As nest_asyncio lets it: the kernel takes requests from the socket while interrupts are the cell's."""
    with session(ours()) as running:
        first = running.send(NESTED, stop_on_error=False, allow_stdin=True)
        running.reply(first, "stdin")
        second = running.send("print('second')")
        running.client.input("")
        assert running.reply(first)["content"]["ename"] == "KeyboardInterrupt"
        assert running.reply(second)["content"]["status"] == "ok"


@pytest.mark.parametrize("channel", ["shell", "control"])
def test_a_request_in_which_the_users_code_exits(channel: str) -> None:
    with session(ours()) as running:
        running.run("class Exits:\n    def __repr__(self):\n        raise SystemExit\nx = Exits()")
        message = running.client.session.msg("inspect_request", {"code": "x", "cursor_pos": 1, "detail_level": 0})
        getattr(running.client, f"{channel}_channel").send(message)
        content = running.reply(message["header"]["msg_id"], channel)["content"]
        assert (content["status"], content["ename"]) == ("error", "SystemExit")
        assert running.text("print('alive')") == "alive\n"


def test_closed_stderr() -> None:
    """What has no cell to appear under is said on the process's own stderr, if there is one."""
    with session(ours()) as running:
        running.run("import asyncio, sys\nsys.__stderr__.close()")
        running.run("def fail():\n    raise KeyboardInterrupt\nasyncio.get_running_loop().call_soon(fail)")
        message = running.client.session.msg("strange_request", {})
        running.client.shell_channel.send(message)
        assert running.reply(message["header"]["msg_id"])["content"]["ename"] == "ValueError"
        assert running.text("print('alive')") == "alive\n"
