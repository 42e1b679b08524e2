# SPDX-License-Identifier: MIT
"""What a notebook's user can do to the kernel, and what it must survive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from conftest import wait_for
from jupyter_client.blocking.client import BlockingKernelClient
from kernel_sessions import SECONDS, Session, ours, session, text_of
from overmind import _kernel


@pytest.fixture(scope="module")
def shared() -> Iterator[Session]:
    with session(ours()) as running:
        yield running


@pytest.fixture
def own() -> Iterator[Session]:
    with session(ours()) as running:
        yield running


XEUS_5 = pytest.mark.skipif(
    int(_kernel.XEUS_VERSION.partition(".")[0]) >= 5, reason="its API has no room for it; see server_xeus5.cc"
)


def printed(word: str) -> Any:
    return lambda message: message["msg_type"] == "stream" and word in message["content"]["text"]


# Clients.


@contextlib.contextmanager
def client_of(connection_file: str) -> Iterator[BlockingKernelClient]:
    """One with a session of its own, that the kernel has answered."""
    client = BlockingKernelClient(connection_file=connection_file)
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield client
    finally:
        client.stop_channels()


def shut_down(connection_file: str, process: subprocess.Popen[bytes]) -> None:
    """By a client; the kernel ends well."""
    with client_of(connection_file) as client:
        client.shutdown()
        assert process.wait(SECONDS) == 0


def test_a_new_client_disturbs_no_other(shared: Session) -> None:
    """xeus 5 tells all of them, in a message whose parent is null."""
    with client_of(shared.manager.connection_file):
        assert shared.text("print('undisturbed')") == "undisturbed\n"
        assert all(isinstance(stray["parent_header"], dict) for stray in shared.strays)


# Interrupts.

BUSY = {
    "sleep": "import time\nprint('begun', flush=True)\ntime.sleep(100)",
    "computing": "print('begun', flush=True)\nwhile True: pass",
    "subprocess": "import subprocess\nprint('begun', flush=True)\nsubprocess.run(['sleep', '100'])",
    "shell": "!echo begun; sleep 100",
    "bash": "%%bash\necho begun\nsleep 100",
    "input": "print('begun', flush=True)\ninput()",
    "await": "import asyncio\nprint('begun', flush=True)\nawait asyncio.sleep(100)",
    "computing after await": "import asyncio\nawait asyncio.sleep(0)\nprint('begun', flush=True)\nwhile True: pass",
    "caught once": "import time\ntry:\n    print('begun', flush=True)\n    time.sleep(100)\n"
    "except KeyboardInterrupt: print('caught')\nraise KeyboardInterrupt",
}


def working(kernel: psutil.Process) -> list[psutil.Process]:
    """Programs of the kernel that have not ended. An interrupt that comes while Popen is being made leaves a zombie:
    nobody knows its pid yet, so nobody waits for it, with any kernel."""
    found = []
    for child in kernel.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.mark.parametrize("how", ["signal", "message"])
@pytest.mark.parametrize("name", BUSY)
def test_interrupt(shared: Session, name: str, how: str) -> None:
    msg_id = shared.send(BUSY[name])
    shared.outputs(msg_id, printed("begun"))
    kernel = psutil.Process(shared.manager.provisioner.pid)
    if name in ("subprocess", "shell", "bash"):
        wait_for(lambda: "sleep" in [child.name() for child in kernel.children(recursive=True)], 10, "the program")
    if how == "signal":
        shared.manager.interrupt_kernel()
    else:
        message = shared.client.session.msg("interrupt_request", {})
        shared.client.control_channel.send(message)
        assert shared.reply(message["header"]["msg_id"], "control")["content"] == {"status": "ok"}
    content = shared.reply(msg_id)["content"]
    if name == "shell":  # the command is interrupted; the cell goes on, as with ipykernel
        assert content["status"] in ("ok", "error")
    else:
        assert content["status"] == "error"
        assert content["ename"] in ("KeyboardInterrupt", "CancelledError", "CalledProcessError")
    assert shared.text("print(1 + 1)") == "2\n"
    wait_for(lambda: not working(kernel), 10, "the interrupted program has ended")


def test_interrupts_while_idle_do_nothing(shared: Session) -> None:
    for _ in range(20):
        shared.manager.interrupt_kernel()
    assert shared.text("print(1 + 1)") == "2\n"


def test_many_interrupts(own: Session) -> None:
    """However they fall, each request gets exactly one reply."""
    ids = [own.send("for i in range(3000): pass", stop_on_error=False) for _ in range(200)]
    for _ in range(100):
        own.manager.interrupt_kernel()
        time.sleep(0.002)  # the spread of them over the cells is the point
    replies = [own.reply(msg_id)["content"]["status"] for msg_id in ids]
    assert set(replies) <= {"ok", "error"}
    assert own.text("print('alive')") == "alive\n"


def test_own_interrupt_handler_of_a_cell_ends_with_it(shared: Session) -> None:
    code = (
        "import signal\nold = signal.signal(signal.SIGINT, lambda *a: None)\nprint(old is signal.default_int_handler)"
    )
    assert shared.text(code) == "True\n"
    assert shared.text("print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)") == "True\n"


# Overmind itself.


def test_a_notebook_that_loads_the_extension_is_told_nothing(own: Session) -> None:
    """It is loaded before the first cell, and most notebooks begin with that cell."""
    on = "from overmind import extension\nprint(extension.enabled())"
    reply, outputs = own.run("%load_ext overmind")
    assert reply["status"] == "ok" and [one["msg_type"] for one in outputs] == ["execute_input"]
    assert own.text("%load_ext overmind") == ""
    assert own.text(on) == "True\n"
    assert own.text("%unload_ext overmind") == ""
    assert own.text(on) == "False\n"
    assert own.run("%overmind status")[0]["status"] == "error"
    assert own.text("%load_ext overmind") == ""
    assert own.text(on) == "True\n"
    assert own.text("%reload_ext overmind") == ""
    assert own.text(on) == "True\n" and "folder" in own.text("%overmind status")
    assert "already loaded" in own.text("%load_ext autoreload\n%load_ext autoreload")


def test_the_extension_can_be_switched_off_in_the_first_cell(own: Session) -> None:
    assert own.text("%unload_ext overmind") == ""
    assert own.text("from overmind import extension\nprint(extension.enabled())") == "False\n"


def test_wrong_settings_are_said_where_they_are_asked_for(runtime: Path) -> None:
    with session(ours(), env={**os.environ, "OVERMIND_BUDGET": "lots"}) as running:
        assert "OVERMIND_BUDGET" in running.text("%load_ext overmind")
        code = "import overmind, pathlib\novermind.load(pathlib.Path.read_bytes, pathlib.Path(overmind.__file__));"
        assert "OVERMIND_BUDGET" in text_of(running.run(code)[1], "stderr")
        assert "OVERMIND_BUDGET" in running.text("%overmind why")


# asyncio.


def test_tasks_go_on_between_cells(shared: Session) -> None:
    code = (
        "import asyncio\n"
        "async def later():\n"
        "    await asyncio.sleep(0.2)\n    print('from the task')\n    display('shown by the task')\n"
        "task = asyncio.create_task(later())"
    )
    first = shared.send(code)
    shared.outputs(first)
    shared.reply(first)
    late = shared.outputs(first, lambda message: message["msg_type"] == "display_data")
    assert "from the task" in text_of(late)


def test_output_of_tasks_and_threads_belongs_to_their_cells(shared: Session) -> None:
    code = (
        "import asyncio, threading\ngo = asyncio.Event()\n"
        "async def later():\n    await go.wait()\n    print('task output', flush=True)\n"
        "task = asyncio.create_task(later())"
    )
    first = shared.send(code)
    shared.outputs(first)
    second = shared.send("go.set()\nawait asyncio.sleep(0.1)\nprint('second cell')")
    messages = [shared.client.get_iopub_msg(timeout=SECONDS) for _ in range(5)]
    by_cell = {
        message["content"]["text"]: message["parent_header"]["msg_id"]
        for message in messages
        if message["msg_type"] == "stream"
    }
    assert by_cell == {"task output\n": first, "second cell\n": second}
    shared.reply(second)


def test_the_loop_survives_its_user(own: Session) -> None:
    own.run("import asyncio\nloop = asyncio.get_running_loop()\nloop.stop()")
    assert own.text("print(asyncio.get_running_loop() is loop)") == "True\n"
    own.run("def fail():\n    raise KeyboardInterrupt\nloop.call_later(0.01, fail)\nawait asyncio.sleep(0.2)")
    own.run("def end():\n    raise SystemExit\nloop.call_later(0.01, end)\nawait asyncio.sleep(0.2)")
    assert own.text("print('alive')") == "alive\n"


# Input.


def answer(running: Session, msg_id: str, value: str) -> dict[str, Any]:
    """Answers what the cell asks, and tells what it was; cells that were interrupted may have asked before."""
    request = running.reply(msg_id, "stdin")
    assert request["msg_type"] == "input_request"
    running.client.input(value)
    return request["content"]


def test_input_and_getpass(shared: Session) -> None:
    msg_id = shared.send(
        "import getpass\nprint(repr(input('name? ')), repr(getpass.getpass('secret? ')))", allow_stdin=True
    )
    assert answer(shared, msg_id, "Ada") == {"prompt": "name? ", "password": False}
    assert answer(shared, msg_id, "xyzzy") == {"prompt": "secret? ", "password": True}
    assert text_of(shared.outputs(msg_id)) == "'Ada' 'xyzzy'\n"
    shared.reply(msg_id)


def test_input_refused(shared: Session) -> None:
    reply, _outputs = shared.run("input()", allow_stdin=False)
    assert reply["ename"] == "StdinNotImplementedError"


def test_end_of_input(shared: Session) -> None:
    msg_id = shared.send("input()", allow_stdin=True)
    answer(shared, msg_id, "\x04")
    assert shared.reply(msg_id)["content"]["ename"] == "EOFError"
    shared.outputs(msg_id)


@XEUS_5
def test_stale_answers_are_dropped(shared: Session) -> None:
    msg_id = shared.send("input('first')", allow_stdin=True)
    shared.reply(msg_id, "stdin")
    shared.manager.interrupt_kernel()
    shared.reply(msg_id)
    shared.outputs(msg_id)
    shared.client.input("late answer to the first")
    shared.text("import time; time.sleep(0.2)")  # until it is in the kernel's socket
    msg_id = shared.send("print(input('second'))", allow_stdin=True)
    answer(shared, msg_id, "answer to the second")
    assert text_of(shared.outputs(msg_id)) == "answer to the second\n"
    shared.reply(msg_id)


# Output.

LOW_LEVEL = {
    "os.write": "import os\nos.write(1, b'low\\n')",
    "subprocess": "import subprocess\nsubprocess.run(['echo', 'low'])",
    "printf": "import ctypes\nctypes.CDLL(None).printf(b'low\\n')",
    "stderr": "import os\nos.write(2, b'low\\n')",
    "fork": "import os\nif not (pid := os.fork()):\n    print('low', flush=True)\n    os._exit(0)\nos.waitpid(pid, 0)",
    "fork with exit": "import os\nif not (pid := os.fork()):\n    print('low')\n    os._exit(0)\nos.waitpid(pid, 0)",
    "multiprocessing": "import multiprocessing as m\np = m.get_context('fork').Process(target=print, args=('low',))\n"
    "p.start(); p.join()",
}


@pytest.mark.parametrize("name", LOW_LEVEL)
def test_output_below_python(shared: Session, name: str) -> None:
    """It is there before the cell is done."""
    _reply, outputs = shared.run(LOW_LEVEL[name])
    assert text_of(outputs, "stderr" if name == "stderr" else "stdout") == "low\n"


def test_split_characters_below_python(shared: Session) -> None:
    code = (
        "import os, time\nfor b in '\\u4e2d\\U0001f600'.encode(): os.write(1, bytes([b])); time.sleep(0.01)\n"
        "os.write(1, b'\\xff\\n');"
    )
    assert shared.text(code) == "\u4e2d\U0001f600\ufffd\n"


def test_surrogates_and_nul(shared: Session) -> None:
    assert shared.text("print('a\\udc80b\\x00c\\ud83d')") == "a?b\x00c?\n"
    _reply, outputs = shared.run("raise ValueError('\\udc80')")
    assert outputs[-1]["msg_type"] == "error"


def test_no_display_is_lost(shared: Session) -> None:
    msg_id = shared.send("for i in range(5000): display(i)")
    outputs = shared.outputs(msg_id)
    shown = [int(one["content"]["data"]["text/plain"]) for one in outputs if one["msg_type"] == "display_data"]
    assert shown == list(range(5000))
    shared.reply(msg_id)


FLUSHED = 10_000


def test_a_client_that_reads_late_misses_nothing(shared: Session) -> None:
    """A limit of a thousand messages, and thirty thousand in a second, had lost most lines and the cell's idle."""
    msg_id = shared.send(f"for i in range({FLUSHED}): print(i, flush=True)")
    assert shared.reply(msg_id)["content"]["status"] == "ok"
    assert text_of(shared.outputs(msg_id)).split() == list(map(str, range(FLUSHED)))


def test_messages_come_no_faster_than_clients_read(shared: Session) -> None:
    """As fast as ipykernel's: 5,000 in a second after the first 500; see publisher.cc."""
    code = f"import time\nt = time.monotonic()\nfor i in range({FLUSHED}): print(i, flush=True)\ntime.monotonic() - t"
    outputs = shared.run(code)[1]
    assert float(outputs[-1]["content"]["data"]["text/plain"]) > (FLUSHED - 1000) / 5000


def test_output_while_a_cell_runs(shared: Session) -> None:
    msg_id = shared.send("print('early')\nimport time\nwhile not stop: time.sleep(0.01)", allow_stdin=False)
    shared.outputs(msg_id)  # stop is not defined: the cell fails, but that came late enough
    shared.reply(msg_id)
    shared.run("stop = []")
    msg_id = shared.send("print('early')\nwhile not stop: time.sleep(0.01)")
    assert "early" in text_of(shared.outputs(msg_id, printed("early")))
    shared.manager.interrupt_kernel()
    shared.outputs(msg_id)
    shared.reply(msg_id)


def test_file_numbers_reach_the_server(shared: Session) -> None:
    assert shared.text("import sys; print(sys.stdout.fileno() > 2, sys.stderr.fileno() > 2)") == "True True\n"


# One reply, whatever happens.

HOSTILE = {
    "exception that can't be shown": "class E(Exception):\n def __str__(self): raise RuntimeError\nraise E",
    "no stdout": "import sys\nsys.stdout = None",
    "broken stdout": "import sys\nclass B:\n def flush(self): raise OSError('no')\n write = flush\n"
    "sys.stdout = B()\nprint('x')",
    "closed stdout": "import sys\nsys.stdout.close()",
    "no displayhook": "import sys\nsys.displayhook = None\n5",
    "failing hook": "def f(*a): raise RuntimeError('hook')\nget_ipython().events.register('post_execute', f)",
    "after failing hook": "get_ipython().events.unregister('post_execute', f)",
    "transformer": "def t(lines): raise RuntimeError('transform')\nget_ipython().input_transformers_post.append(t)",
    "after transformer": "1",
    "not JSON": "class S:\n def _repr_mimebundle_(self, **k): return {'x/y': object()}\nS()",
    "nan": "class N:\n def _repr_mimebundle_(self, **k): return {'application/json': {'x': float('nan')}}\nN()",
    "own exception handler": "def h(shell, t, v, tb, tb_offset=None): raise RuntimeError('handler')\n"
    "get_ipython().set_custom_exc((ZeroDivisionError,), h)\n1/0",
    "recursion": "def r(): return r()\nr()",
    "deep data": "x = []\nfor _ in range(100000): x = [x]\ndisplay({'application/json': x}, raw=True)",
    "cancelled": "import asyncio\nraise asyncio.CancelledError",
    "generator exit": "raise GeneratorExit",
    "interrupt thrown": "raise KeyboardInterrupt",
    "cancels itself": "import asyncio\nasyncio.current_task().cancel()\nawait asyncio.sleep(1)",
    "cancels all": "import asyncio\nfor t in asyncio.all_tasks(): t.cancel()",
    "closes the loop": "import asyncio\nasyncio.get_event_loop().close()",
    "nul in the code": "'\x00'",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_reply(own: Session, name: str) -> None:
    msg_id = own.send(HOSTILE[name], stop_on_error=False)
    reply = own.reply(msg_id)["content"]
    assert reply["status"] in ("ok", "error")
    own.outputs(msg_id)
    msg_id = own.send("6 * 7", stop_on_error=False)
    assert own.reply(msg_id)["content"]["status"] in ("ok", "error")
    own.outputs(msg_id)
    assert not own.client.shell_channel.msg_ready(), "a second reply"


@XEUS_5
def test_half_a_character_in_the_code(shared: Session) -> None:
    """JavaScript escapes one half of a character that it cut; Python's client can't even send it."""
    client = shared.client.session
    message = client.msg("execute_request", {"code": "'\ud83d'"})
    parts = [
        json.dumps(message[name], default=str).encode() for name in ("header", "parent_header", "metadata", "content")
    ]
    shared.client.shell_channel.socket.send_multipart([b"<IDS|MSG>", client.sign(parts), *parts])
    assert shared.reply(message["msg_id"])["content"]["status"] in ("ok", "error")
    shared.outputs(message["msg_id"])


def test_unserializable_user_expression(shared: Session) -> None:
    shared.run("class S:\n def _repr_mimebundle_(self, **k): return {'x/y': object()}\ns = S()")
    msg_id = shared.send("1", user_expressions={"s": "s"})
    assert shared.reply(msg_id)["content"]["status"] == "error"
    shared.outputs(msg_id)


@pytest.mark.parametrize("channel", ["shell", "control"])
@pytest.mark.parametrize("kind", ["no_such_request", "execute_request", "complete_request"])
def test_malformed_requests_are_answered(shared: Session, kind: str, channel: str) -> None:
    message = shared.client.session.msg(kind, {"wrong": 1})
    getattr(shared.client, f"{channel}_channel").send(message)
    content = shared.reply(message["header"]["msg_id"], channel)["content"]
    assert content["status"] == "error"
    assert content["ename"]


def test_garbage_is_dropped(own: Session) -> None:
    info = own.manager.get_connection_info()
    context = zmq.Context()
    for port in ("shell_port", "control_port", "stdin_port"):
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://{info['ip']}:{info[port]}")
        for frames in (
            [b""],
            [b"<IDS|MSG>"],
            [b"<IDS|MSG>", b"short", b"{}", b"{}", b"{}", b"{}"],
            [b"<IDS|MSG>", b"0" * 64, b"{}", b"{}", b"{}", b"{}"],
            [os.urandom(100)] * 8,
        ):
            socket.send_multipart(frames)
        wrong = own.client.session.clone()
        wrong.key = b"another key"
        wrong.send(socket, "execute_request", {"code": "open('/tmp/never', 'w')"})
        for header in ([], 5, {}, {"msg_type": 7}):  # signed, but no header
            parts = [json.dumps(part).encode() for part in (header, {}, {}, {})]
            socket.send_multipart([b"<IDS|MSG>", own.client.session.sign(parts), *parts])
        socket.close(linger=1000)
    context.term()
    assert own.text("print('alive')") == "alive\n"


def test_cells_after_a_failed_one_are_aborted(shared: Session) -> None:
    first = shared.send("import time; time.sleep(0.3); 1/0")
    rest = [shared.send("print('never')") for _ in range(5)]
    info = shared.client.kernel_info()
    assert shared.reply(first)["content"]["status"] == "error"
    for msg_id in rest:
        reply = shared.reply(msg_id)
        assert reply["content"] == {"status": "aborted"}
        assert reply["metadata"]["status"] == "aborted"
    assert shared.reply(info)["content"]["status"] == "ok"
    first = shared.send("1/0", stop_on_error=False)
    second = shared.send("1")
    assert shared.reply(second)["content"]["status"] == "ok"
    shared.outputs(second)


# Comms.


def comm_message(running: Session, kind: str, content: dict[str, Any]) -> str:
    message = running.client.session.msg(kind, content)
    running.client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def test_comms_both_ways(shared: Session) -> None:
    shared.run(
        "from comm import create_comm, get_comm_manager\n"
        "def opened(comm, message):\n"
        "    comm.on_msg(lambda m: comm.send({'echo': m['content']['data']}, buffers=m['buffers']))\n"
        "    comm.send({'opened': message['content']['data']})\n"
        "get_comm_manager().register_target('echo', opened)"
    )
    msg_id = comm_message(shared, "comm_open", {"comm_id": "c1", "target_name": "echo", "data": {"n": 1}})
    assert [m["content"]["data"] for m in shared.outputs(msg_id) if m["msg_type"] == "comm_msg"] == [
        {"opened": {"n": 1}}
    ]
    message = shared.client.session.msg("comm_msg", {"comm_id": "c1", "data": [2**70, "x"]})
    shared.client.session.send(shared.client.shell_channel.socket, message, buffers=[b"\x00\xff"])
    (echo,) = [m for m in shared.outputs(message["header"]["msg_id"]) if m["msg_type"] == "comm_msg"]
    assert echo["content"]["data"] == {"echo": [2**70, "x"]}
    assert [bytes(buffer) for buffer in echo["buffers"]] == [b"\x00\xff"]
    assert "c1" in shared.reply(shared.client.comm_info())["content"]["comms"]
    comm_message(shared, "comm_close", {"comm_id": "c1", "data": {}})
    assert shared.reply(shared.client.comm_info("echo"))["content"]["comms"] == {}


def test_unknown_comm_target_is_closed(shared: Session) -> None:
    msg_id = comm_message(shared, "comm_open", {"comm_id": "c2", "target_name": "no.such", "data": {}})
    assert "comm_close" in [message["msg_type"] for message in shared.outputs(msg_id)]


def test_a_cell_can_await_a_comm_message(shared: Session) -> None:
    shared.run(
        "import asyncio\nfrom comm import create_comm\nc = create_comm(target_name='t', comm_id='c3')\n"
        "got = asyncio.get_running_loop().create_future()\nc.on_msg(lambda m: got.set_result(m['content']['data']))"
    )
    msg_id = shared.send("print('waiting', flush=True)\nprint(await got)")
    shared.outputs(msg_id, printed("waiting"))
    comm_message(shared, "comm_msg", {"comm_id": "c3", "data": "there"})
    assert text_of(shared.outputs(msg_id)) == "there\n"
    shared.reply(msg_id)


def test_widgets(shared: Session) -> None:
    reply, outputs = shared.run(
        "import ipywidgets\nslider = ipywidgets.IntSlider(value=3)\nseen = []\n"
        "slider.observe(lambda change: (seen.append(change['new']), print('now', change['new'])), 'value')\nslider"
    )
    assert reply["status"] == "ok"
    assert [one["msg_type"] for one in outputs if one["msg_type"] == "comm_open"]
    view = outputs[-1]["content"]["data"]["application/vnd.jupyter.widget-view+json"]
    data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    msg_id = comm_message(shared, "comm_msg", {"comm_id": view["model_id"], "data": data})
    assert "now 7" in text_of(shared.outputs(msg_id))
    assert shared.text("print(slider.value, seen)") == "7 [7]\n"
    reply, outputs = shared.run("out = ipywidgets.Output()\nwith out:\n    print('inside')\n    1/0")
    assert reply["status"] == "ok", "an Output widget takes the error"


def test_ipykernel_as_a_library_does_not_take_the_comms(shared: Session) -> None:
    shared.run("import ipykernel.ipkernel, comm\nc = comm.create_comm(target_name='x', comm_id='c4')")
    assert "c4" in shared.reply(shared.client.comm_info())["content"]["comms"]


# Around the kernel.


def test_overmind_is_loaded(shared: Session) -> None:
    assert "overmind" in shared.text(
        "import overmind, sys; print([m for m in sys.modules if m == 'overmind.extension'])"
    )
    assert shared.text("print('overmind' in get_ipython().magics_manager.magics['line'])") == "True\n"


def test_over_ipc(tmp_path: Path) -> None:
    folder = Path(os.path.realpath(tmp_path))
    with session(ours(), transport="ipc", folder=folder if len(str(folder)) < 80 else Path("/tmp")) as running:
        assert running.text("print(1)") == "1\n"


def test_it_writes_a_connection_file(tmp_path: Path) -> None:
    """As `jupyter console --existing` needs it, when the kernel is started by hand."""
    file = tmp_path / "own.json"
    command = [part.replace("{connection_file}", str(file)) for part in ours()]
    with subprocess.Popen(command, env=os.environ | {"OVERMIND_ZYGOTE": "0"}) as process:
        wait_for(file.exists, SECONDS, "the connection file")
        shut_down(str(file), process)
    assert not file.exists(), "who made the file removes it"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{not json", "can't be read"),
        ("[]", "no JSON object"),
        ('{"curve_secretkey": "x"}', "CurveZMQ"),
        ('{"transport": "udp"}', "neither tcp nor ipc"),
        ('{"signature_scheme": "hmac-none", "key": "k"}', "signature scheme"),
        ('{"ip": "203.0.113.1", "key": "k"}', "could not be bound"),
    ],
)
def test_a_connection_file_that_will_not_do(tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    command = [part.replace("{connection_file}", str(file)) for part in ours()]
    environment = os.environ | {"OVERMIND_ZYGOTE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_free_a_moment_later(tmp_path: Path) -> None:
    """Whoever looks for free ports holds each for a moment."""
    from jupyter_client import write_connection_file

    file, content = write_connection_file(str(tmp_path / "c.json"))
    command = [part.replace("{connection_file}", file) for part in ours()]
    with socket.create_server(("127.0.0.1", content["iopub_port"])) as holder:  # it is bound last
        process = subprocess.Popen(command, env=os.environ | {"OVERMIND_ZYGOTE": "0"})
        others = [content[f"{name}_port"] for name in ("shell", "control", "stdin", "hb")]
        wait_for(lambda: any(map(_listens, others)) or process.poll() is not None, SECONDS, "another of its sockets")
        holder.close()
    # A client that asks between two attempts loses its heartbeat, and takes the kernel for dead.
    last = content["iopub_port"]
    wait_for(lambda: _listens(last) or process.poll() is not None, SECONDS, "the socket that is bound last")
    with process:
        shut_down(file, process)


FORKING = """
import os, sys, threading
import overmind.kernel.app as app
assert threading.active_count() == 1
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
app.prepare()
assert threading.active_count() == 1 and not [f for f in os.listdir("/proc/self/fd") if int(f) > 10]
sys.exit(app.serve(sys.argv[1]))
"""


def test_in_a_forked_child() -> None:
    """Imports in the parent, the shell before it is known whom to serve: how a zygote starts it."""
    with session([sys.executable, "-c", FORKING, "{connection_file}"]) as running:
        assert running.text("print(6 * 7)") == "42\n"
        reply, _outputs = running.run("import asyncio\nawait asyncio.sleep(0.01)\n1/0")
        assert reply["ename"] == "ZeroDivisionError"
        running.client.history(hist_access_type="tail", n=1)


def test_shutdown_ends_the_programs_of_cells(own: Session) -> None:
    pid = int(own.text("import subprocess\np = subprocess.Popen(['sleep', '100'])\nprint(p.pid)"))
    own.close()
    wait_for(lambda: not psutil.pid_exists(pid), 10, "a cell's program outlives its kernel")


def test_atexit_and_open_files(own: Session, tmp_path: Path) -> None:
    file = tmp_path / "f"
    own.run(f"import atexit\nf = open({str(file)!r}, 'w')\nf.write('buffered')\natexit.register(f.write, ' at exit')")
    own.close()
    assert file.read_text() == "buffered at exit"


@pytest.mark.parametrize("code", ["exit", "quit()", "get_ipython().ask_exit()"])
def test_exit(own: Session, code: str) -> None:
    msg_id = own.send(code)
    assert own.reply(msg_id)["content"]["payload"][0]["source"] == "ask_exit"
    wait_for(lambda: not own.manager.is_alive(), SECONDS, "the end of the kernel")


def test_shutdown_over_control_while_a_cell_awaits(own: Session) -> None:
    msg_id = own.send("import asyncio\nprint('begun', flush=True)\nawait asyncio.sleep(100)")
    own.outputs(msg_id, printed("begun"))
    own.client.shutdown()
    wait_for(lambda: not own.manager.is_alive(), SECONDS, "the end of the kernel")


def test_the_kernel_dies_with_its_server(tmp_path: Path) -> None:
    """The server is killed; nobody tells the kernel."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from kernel_sessions import *\nrunning = Session(ours())\nprint(running.manager.provisioner.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    server.send_signal(signal.SIGKILL)
    server.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(pid)
        wait_for(lambda: not kernel.is_running() or kernel.status() == "zombie", 10, "the end of the orphan")


def test_restarts_leave_nothing(own: Session) -> None:
    for _ in range(3):
        own.manager.restart_kernel(now=False)
        own.client.wait_for_ready(timeout=SECONDS)
        assert own.text("print(1)") == "1\n"
