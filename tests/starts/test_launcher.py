# SPDX-License-Identifier: MIT
"""What is done to the launcher is done to the program that was forked for it, and the other way round."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import stop_daemon, wait_for
from starts import forked, gone, native, outcome, overmind_run, plain_starts, warm, zygotes

SCRIPT = '''
import os, signal, subprocess, sys, time

def tell(text):
    os.write(1, (text + "\\n").encode())

def main():
    """Says its id, then what happens to it, until it is told to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH):
        signal.signal(number, lambda number, frame: tell("signal %d" % number))
    if "child" in sys.argv:
        child = subprocess.Popen(["sleep", "300"])
        tell("child %d" % child.pid)
    tell("pid %d" % os.getpid())
    while True:
        line = sys.stdin.readline()
        if not line:
            return 4
        tell("line " + line.strip())
        if line.startswith("exit"):
            return int(line.split()[1])
        if line.startswith("die"):
            os.kill(os.getpid(), int(line.split()[1]))

sys.exit(main())
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    script = tmp_path_factory.mktemp("launcher") / "script.py"
    script.write_text(SCRIPT)
    runtime = Path(f"/tmp/ov-{os.getpid()}-launch")
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERMIND_RUNTIME_DIR", str(runtime))
        patch.setenv("HF_HUB_OFFLINE", "1")
        warm(runtime, str(script))
        yield runtime, script
        stop_daemon(runtime)
        shutil.rmtree(runtime, ignore_errors=True)


class Running:
    """A program that reads lines and says what happens to it."""

    def __init__(self, runtime: Path, script: Path, *words: str, command: list[str] | None = None) -> None:
        before = plain_starts(runtime)
        self.popen = subprocess.Popen(
            command or overmind_run(str(script), *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.child = int(self.line("child").split()[1]) if "child" in words else 0
        self.pid = int(self.line("pid").split()[1])
        assert command or (self.pid != self.popen.pid and plain_starts(runtime) == before), "it was a plain start"

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.popen.pid, self.child):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for stream in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self.popen.wait(20)

    def line(self, start: str) -> str:
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        assert text.startswith(start), text
        return text

    def hears(self, number: int) -> None:
        """Until it says that the signal arrived. One that comes just before a read of its is seen after that read."""
        assert self.popen.stdout is not None
        while True:
            self.say("ping")
            text = self.popen.stdout.readline()
            if text.startswith(f"signal {number}"):
                self.line("line ping")
                return
            assert text.startswith("line ping"), text

    def say(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH])
def test_signals_reach_the_program(place: tuple[Path, Path], number: int) -> None:
    with Running(*place) as running:
        os.kill(running.popen.pid, number)
        running.hears(int(number))
        running.say("exit 0")
        assert running.popen.wait(20) == 0


def test_an_interrupt_reaches_the_program_only(place: tuple[Path, Path]) -> None:
    with Running(*place, "child") as running:
        os.kill(running.popen.pid, signal.SIGINT)
        running.hears(2)
        assert not gone(running.child)


@pytest.mark.parametrize(("say", "code"), [("exit 3", 3), ("die 15", 0), ("die 9", -9), ("die 11", -11), ("die 6", -6)])
def test_it_ends_as_the_program_does(place: tuple[Path, Path], say: str, code: int) -> None:
    with Running(*place) as running:
        running.say(say)
        if say == "die 15":  # handled
            running.say("exit 0")
        assert running.popen.wait(20) == code
        wait_for(lambda: gone(running.pid), 5, "no zombie is left")


def test_the_end_of_input(place: tuple[Path, Path]) -> None:
    with Running(*place) as running:
        running.popen.stdin.close()  # type: ignore[union-attr]
        assert running.popen.wait(20) == 4


def test_the_program_dies_with_its_launcher(place: tuple[Path, Path]) -> None:
    with Running(*place) as running:
        running.popen.kill()
        running.popen.wait(5)
        wait_for(lambda: gone(running.pid), 5, "the program has ended")


def test_a_stopped_launcher_stops_the_program(place: tuple[Path, Path]) -> None:
    with Running(*place) as running:
        os.kill(running.popen.pid, signal.SIGTSTP)
        wait_for(lambda: psutil.Process(running.pid).status() == psutil.STATUS_STOPPED, 5, "the program is stopped")
        wait_for(lambda: psutil.Process(running.popen.pid).status() == psutil.STATUS_STOPPED, 5, "so is the launcher")
        os.kill(running.popen.pid, signal.SIGCONT)
        running.say("exit 0")
        assert running.popen.wait(20) == 0


def test_the_zygote_dies_and_the_program_lives_on(place: tuple[Path, Path]) -> None:
    runtime, script = place
    with Running(*place) as running, Running(*place) as other:
        for row in zygotes(runtime):
            os.kill(row["pid"], signal.SIGKILL)
        running.say("hello")
        running.line("line hello")
        running.say("exit 6")
        running.line("line exit")
        assert running.popen.wait(20) == 6
        other.say("die 9")
        assert other.popen.wait(20) == -9
    warm(runtime, str(script))


def test_ignored_and_blocked_signals_are_inherited(place: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, _ = place
    script = tmp_path / "s.py"
    script.write_text(
        "import signal\n"
        "print(signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT), signal.pthread_sigmask(0, []))\n"
    )
    warm(runtime, str(script))

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    assert forked(runtime, str(script), preexec_fn=prepare) == native(str(script), preexec_fn=prepare)


def test_descriptors_are_passed_by_their_numbers(place: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, _ = place
    script = tmp_path / "s.py"
    script.write_text("import os, sys\nfor fd in map(int, sys.argv[1:]): os.write(fd, b'here')\n")
    warm(runtime, str(script))
    reading, writing = os.pipe()
    try:
        done = forked(runtime, str(script), str(writing), pass_fds=[writing])
        assert done.code == 0 and os.read(reading, 100) == b"here"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_module(place: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, _ = place
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__)\n"
        "if 'fail' in sys.argv: raise ValueError(1)\nif 'stop' in sys.argv: raise KeyboardInterrupt\nsys.exit(2)\n"
    )
    warm(runtime, "-m", "package", cwd=tmp_path)
    for words in (["-m", "package", "a"], ["-m", "package", "fail"], ["-m", "package", "stop"]):
        assert forked(runtime, *words, cwd=tmp_path) == native(*words, cwd=tmp_path)
    missing = outcome(overmind_run("-m", "no_such_module_here"), cwd=tmp_path)
    assert missing == native("-m", "no_such_module_here", cwd=tmp_path)


def test_what_is_no_script(place: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.py").write_text("a =\n")
    for words in ([str(tmp_path / "missing.py")], [str(tmp_path / "folder")], [str(tmp_path / "bad.py")]):
        found, expected = outcome(overmind_run(*words)), native(*words)
        assert found == expected and expected.code != 0


def test_a_terminal(place: tuple[Path, Path]) -> None:
    """Ctrl-C and Ctrl-Z come from the terminal to the launcher's group, and reach the program's."""
    _runtime, script = place
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(overmind_run()[0], overmind_run(str(script), "child"))
    try:
        seen = b""

        def has(text: bytes) -> bool:
            nonlocal seen
            with contextlib.suppress(OSError):
                seen += os.read(terminal, 4096)
            return text in seen

        os.set_blocking(terminal, False)
        wait_for(lambda: has(b"pid "), 20, "the program runs")
        child = int(seen.split(b"child ")[1].split()[0])
        os.write(terminal, b"\x03")
        wait_for(lambda: has(b"signal 2"), 10, "Ctrl-C arrived")
        wait_for(lambda: gone(child), 5, "and ended the program's own child")
        os.write(terminal, b"\x1a")
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5, "Ctrl-Z stopped it")
        os.kill(pid, signal.SIGCONT)
        os.write(terminal, b"exit 5\n")
        wait_for(lambda: has(b"line exit 5"), 10, "it goes on")
        wait_for(lambda: gone(pid), 10, "it ends")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    finally:
        os.close(terminal)


def test_switched_off(place: tuple[Path, Path], tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import os; print(os.getppid())")
    for name, value in (("OVERMIND_ZYGOTE", "0"), ("OVERMIND_DISABLE", "1"), ("OVERMIND_ZYGOTE", "perhaps")):
        done = outcome(overmind_run(str(script)), env={**os.environ, name: value})
        assert done.code == 0 and done.out.split()[0] == str(os.getpid())
