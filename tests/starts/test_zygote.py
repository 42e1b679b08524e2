# SPDX-License-Identifier: MIT
"""The zygote itself: what it imports, when it refuses, when it goes, who may ask."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from conftest import stop_daemon, wait_for
from processes import STRANGER, as_user
from starts import (
    Kernel,
    caught_up,
    forked,
    native,
    outcome,
    overmind_run,
    plain_starts,
    refused,
    soon_forked,
    warm,
    warm_kernel,
    zygotes,
)

LIBRARY = "overmind_test_library"


@pytest.fixture
def library(site_packages: Path) -> Path:
    """A package in the environment of this test."""
    folder = site_packages / LIBRARY
    folder.mkdir()
    (folder / "__init__.py").write_text("VALUE = 1\n")
    return folder


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_package_that_changes(runtime: Path, library: Path, tmp_path: Path) -> None:
    program = script(tmp_path, f"import {LIBRARY}\nprint({LIBRARY}.VALUE)")
    warm(runtime, program)
    (zygote,) = zygotes(runtime)
    assert forked(runtime, program).out == "1\n"
    (library / "__init__.py").write_text("VALUE = 22\n")
    assert outcome(overmind_run(program)).out == "22\n"
    assert "has changed" in plain_starts(runtime)[-1]
    wait_for(lambda: not psutil.pid_exists(zygote["pid"]), 10, "the old zygote has gone")
    wait_for(lambda: bool(zygotes(runtime)), 60, "a new one is there")
    assert forked(runtime, program).out == "22\n"


def test_a_package_that_is_installed(runtime: Path, library: Path, tmp_path: Path) -> None:
    program = script(tmp_path, "import json; print(json.dumps(1))")
    warm(runtime, program)
    other = library.with_name(f"{LIBRARY}-1.0.dist-info")
    other.mkdir()
    try:
        assert outcome(overmind_run(program)).out == "1\n"
        assert "has changed" in plain_starts(runtime)[-1]
    finally:
        other.rmdir()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()", "the threads"),
        ("print('hello from the import')", "its output"),
        ("kept = open(__file__)", "the open descriptors"),
        ("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "the signal handlers"),
        ("import sys; sys.path.append('/somewhere')", "sys.path"),
        ("import random; random.random(); random.seed(1)", "the random numbers"),
        ("import os; os.chdir('/tmp')", "the working folder"),
    ],
)
def test_an_import_that_does_more(runtime: Path, library: Path, tmp_path: Path, text: str, why: str) -> None:
    """It is left to the program; everything else is still imported ahead."""
    (library / "__init__.py").write_text(text + "\n")
    program = script(tmp_path, f"import random, os, {LIBRARY}, sys, decimal\nprint(os.getcwd(), sys.path[-1])")
    expected = native(program)
    assert warm(runtime, program) == expected
    assert forked(runtime, program) == expected
    found = refused(runtime)
    assert list(found) == [LIBRARY] and why in found[LIBRARY]


def test_what_an_import_says_and_sets_is_done_again(runtime: Path, library: Path, tmp_path: Path) -> None:
    (library / "__init__.py").write_text(
        "import logging, os, warnings\n"
        "os.environ['SET_BY_IMPORT'] = os.environ.get('HOME', '')\n"
        "warnings.filterwarnings('ignore', 'unheard of')\n"
        "warnings.warn('said by an import', FutureWarning)\n"
        "logging.getLogger('library').warning('logged by an import')\n"
    )
    program = script(
        tmp_path,
        f"""
        import os, sys, warnings
        print(os.environ.get("SET_BY_IMPORT"), len(warnings.filters), "{LIBRARY}" in sys.modules)
        import {LIBRARY}
        print(os.environ.get("SET_BY_IMPORT"), len(warnings.filters), warnings.filters[0][0])
        """,
    )
    expected = native(program)
    assert "said by an import" in expected.err and "logged by an import" in expected.err
    assert warm(runtime, program) == expected
    assert forked(runtime, program) == expected


def test_an_environment_that_the_program_changes(runtime: Path, library: Path, tmp_path: Path) -> None:
    """An import that reads a variable which the program sets first can't be made ahead, others can."""
    (library / "__init__.py").write_text("import os\nHOME = os.environ.get('LIBRARY_HOME', 'default')\n")
    program = script(tmp_path, f"import decimal, {LIBRARY}\nprint({LIBRARY}.HOME)")
    warm(runtime, program)
    assert forked(runtime, program).out == "default\n"
    # The edit is seen before anything runs.
    script(
        tmp_path, f"import os, decimal\nos.environ['LIBRARY_HOME'] = 'mine'\nimport {LIBRARY}\nprint({LIBRARY}.HOME)"
    )
    assert outcome(overmind_run(program)).out == "mine\n"
    assert "was edited" in plain_starts(runtime)[-1]
    wait_for(lambda: LIBRARY in refused(runtime), 60, "the zygote has learned it")
    assert soon_forked(runtime, program).out == "mine\n"


DRAWS = "import random\nDRAWN = [random.randint(0, 999_999) for _ in range(700)]\n"


def test_an_import_that_draws_random_numbers(runtime: Path, library: Path, tmp_path: Path) -> None:
    """rich does. It can be made ahead for a program that seeds nothing before it."""
    (library / "__init__.py").write_text(DRAWS)
    program = script(
        tmp_path, f"import random, {LIBRARY}\nrandom.seed(3)\nprint(random.random(), len({LIBRARY}.DRAWN))"
    )
    expected = native(program)
    assert warm(runtime, program) == expected
    assert forked(runtime, program) == expected
    assert refused(runtime) == {}


def test_a_seed_before_an_import_that_draws(runtime: Path, library: Path, tmp_path: Path) -> None:
    (library / "__init__.py").write_text(DRAWS)
    text = f"import random\nSEED\nimport {LIBRARY}\nprint(random.random(), {LIBRARY}.DRAWN[-1])"
    program = script(tmp_path, text.replace("SEED", "random.seed(7)"))
    expected = native(program)
    assert warm(runtime, program) == expected
    wait_for(lambda: LIBRARY in refused(runtime), 60, "the zygote has learned it")
    assert soon_forked(runtime, program) == expected
    script(tmp_path, text.replace("SEED", "random.seed(8)"))
    assert outcome(overmind_run(program)) == native(program) != expected


def test_a_program_that_is_edited_to_seed(runtime: Path, library: Path, tmp_path: Path) -> None:
    (library / "__init__.py").write_text(DRAWS)
    text = f"import random\nimport {LIBRARY}\nprint(len({LIBRARY}.DRAWN))"
    program = script(tmp_path, text)
    warm(runtime, program)
    assert forked(runtime, program).out == "700\n"
    script(tmp_path, text.replace("import random", "import random; random.seed(1)") + "; print(random.random())")
    assert outcome(overmind_run(program)) == native(program)
    assert "may seed" in plain_starts(runtime)[-1]


def test_many_that_import_one_that_is_refused(runtime: Path, library: Path, tmp_path: Path) -> None:
    """A zygote is made anew once for all of them, not once for each."""
    (library / "guilty.py").write_text("kept = open(__file__)\n")
    for number in range(9):
        (library / f"m{number}.py").write_text(f"from . import guilty\nimport {LIBRARY}.guilty as again\n")
    program = script(tmp_path, "".join(f"import {LIBRARY}.m{number}\n" for number in range(9)) + "print(1)")
    assert warm(runtime, program).out == "1\n"
    found = refused(runtime)
    assert len(found) == 10
    assert sum("it imports" in why for why in found.values()) >= 8, found
    assert forked(runtime, program).out == "1\n"


def test_a_file_of_the_users_own_comes_first(runtime: Path, library: Path, tmp_path: Path) -> None:
    program = script(tmp_path, f"import {LIBRARY}\nprint({LIBRARY}.VALUE)")
    warm(runtime, program)
    assert forked(runtime, program).out == "1\n"
    (tmp_path / f"{LIBRARY}.py").write_text("VALUE = 'own'\n")
    assert outcome(overmind_run(program)).out == "own\n"
    assert "lies beside" in plain_starts(runtime)[-1]


def test_a_file_in_a_folder_that_the_program_puts_first(runtime: Path, library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    text = f"import sys; sys.path.insert(0, {str(folder)!r})\nimport fractions, {LIBRARY}\nprint({LIBRARY}.VALUE)"
    program = script(tmp_path, text)
    warm(runtime, program)
    assert forked(runtime, program).out == "1\n"
    (folder / f"{LIBRARY}.py").write_text("VALUE = 'own'\n")
    told = outcome(overmind_run(program))
    assert f"{LIBRARY} of {folder} would have been imported with {LIBRARY}" in told.err, told
    wait_for(lambda: caught_up(runtime), 60, "a zygote waits")
    assert forked(runtime, program).out == "own\n"


def test_torch_s_operators_are_left_alone_at_the_end(runtime: Path, tmp_path: Path) -> None:
    """Those of the imports that were made ahead; a program's own are taken back as ever."""
    program = script(
        tmp_path,
        """
        import weakref, torch
        mine = torch.library.Library("overmind_test", "DEF")
        ends = [each.atexit for each in weakref.finalize._registry if each.peek()[1].__module__ == "torch.library"]
        print(ends.count(True), len(ends) > 1)
        """,
    )
    warm(runtime, program)
    assert forked(runtime, program).out == "1 True\n"


def test_another_environment_has_another_zygote(runtime: Path, tmp_path: Path) -> None:
    program = script(tmp_path, "import os; print(os.environ.get('SOMETHING'), os.environ.get('SHLVL'))")
    warm(runtime, program)
    changed = {**os.environ, "SHLVL": "7"}
    assert forked(runtime, program, env=changed).out == "None 7\n"
    before = len(plain_starts(runtime))
    changed["SOMETHING"] = "else"
    assert warm(runtime, program, env=changed).out == "else 7\n"
    assert len(plain_starts(runtime)) == before + 1
    assert forked(runtime, program, env=changed).out == "else 7\n"
    assert len(zygotes(runtime)) == 2


@pytest.mark.parametrize("what", ["ulimit -n 500", "ulimit -v 8000000", "umask 027; ulimit -c 0; nice -n 1 true"])
def test_limits(runtime: Path, tmp_path: Path, what: str) -> None:
    program = script(
        tmp_path, "import os, resource\nprint([resource.getrlimit(k) for k in range(16)], os.umask(0), os.nice(0))"
    )

    def shell(words: list[str]) -> list[str]:
        return ["/bin/sh", "-c", f'{what}; exec "$@"', "sh", *words]

    expected = outcome(shell([sys.executable, program]))
    assert outcome(shell(overmind_run(program))) == expected
    wait_for(lambda: bool(zygotes(runtime)), 60, "a zygote waits")
    before = plain_starts(runtime)
    assert outcome(shell(overmind_run(program))) == expected
    assert plain_starts(runtime) == before


def test_rich_is_imported_ahead(runtime: Path, tmp_path: Path) -> None:
    """Each of its styles draws a number."""
    program = script(tmp_path, "import fractions, rich.table")
    outcome(overmind_run(program))
    wait_for(lambda: caught_up(runtime), 60, "a zygote waits")
    assert refused(runtime) == {}
    assert forked(runtime, program).code == 0


def test_only_the_same_user_may_ask(runtime: Path, tmp_path: Path) -> None:
    program = script(tmp_path, "print(1)")
    warm(runtime, program)
    (zygote,) = zygotes(runtime)
    assert os.stat(zygote["socket"]).st_mode & 0o077 == 0
    if os.getuid() == 0:
        runtime.chmod(0o755)
        Path(zygote["socket"]).parent.chmod(0o755)
        os.chmod(zygote["socket"], 0o777)
        ask = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
            "print(s.recv(100))"
        )
        done = subprocess.run(
            [*as_user(STRANGER), sys.executable, "-c", ask, zygote["socket"]],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"user {STRANGER} may not ask" in done.stdout, done
        runtime.chmod(0o700)
        Path(zygote["socket"]).parent.chmod(0o700)
    assert forked(runtime, program).out == "1\n"


@pytest.mark.parametrize("message", [b"", b"start", b"x" * 2000, b"start" + b"\0" * 12])
def test_nonsense_is_refused(runtime: Path, tmp_path: Path, message: bytes) -> None:
    program = script(tmp_path, "print(1)")
    warm(runtime, program)
    (zygote,) = zygotes(runtime)
    for descriptors in (0, 3):
        memory = os.memfd_create("nonsense")
        os.write(memory, b"\xff" * 100)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.connect(zygote["socket"])
            socket.send_fds(channel, [message], [memory] * descriptors)
            channel.settimeout(10)
            assert channel.recv(2000) == b"ready" and channel.recv(2000).startswith(b"no ")
        os.close(memory)
    assert forked(runtime, program).out == "1\n"


def test_a_zygote_that_hangs(runtime: Path, tmp_path: Path) -> None:
    """The launcher doesn't wait for it, and the program runs once."""
    program = script(tmp_path, f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    warm(runtime, program)
    (zygote,) = zygotes(runtime)
    os.kill(zygote["pid"], signal.SIGSTOP)
    try:
        assert outcome(overmind_run(program)).code == 0
    finally:
        os.kill(zygote["pid"], signal.SIGCONT)
    assert forked(runtime, program).code == 0
    assert (tmp_path / "runs").read_text() == "xxx"


def test_a_start_while_new_imports_are_made(runtime: Path, tmp_path: Path) -> None:
    """It is a plain one at once, and says so."""
    warm_kernel(runtime, tmp_path, engine="xeus")
    (zygote,) = zygotes(runtime)
    with Kernel(tmp_path, "xeus") as kernel:
        kernel.run("import torch", timeout=120)
        wait_for(lambda: not os.path.exists(zygote["socket"]), 30, "the zygote imports what was learned")
        with Kernel(tmp_path, "xeus") as other:
            assert other.run("print(1)") == "1\n"
    assert plain_starts(runtime)[-1].endswith("plain start of xeus: no zygote of this environment is ready yet")
    wait_for(lambda: caught_up(runtime), 60, "the zygote waits again")
    assert [row["pid"] for row in zygotes(runtime)] == [zygote["pid"]]


def test_the_folder_goes(runtime: Path, tmp_path: Path) -> None:
    warm(runtime, script(tmp_path, "print(1)"))
    (zygote,) = zygotes(runtime)
    shutil.rmtree(runtime)
    wait_for(lambda: not psutil.pid_exists(zygote["pid"]), 20, "the zygote has gone")


def test_stats(runtime: Path, tmp_path: Path) -> None:
    from overmind import commands, display

    program = script(tmp_path, "import decimal")
    warm(runtime, program)
    forked(runtime, program)

    def told() -> bool:
        (row,) = commands.stats(here=False)["zygotes"]
        return bool(row["forks"] == 1 and row["running"] == 0)

    wait_for(told, 20, "the start is counted")
    found = commands.stats(here=False)
    assert found["zygotes"][0]["modules"] > 0 and found["zygotes"][0]["memory"] > 1 << 20
    assert found["plain_start"]["target"] == program and abs(found["plain_start"]["when"] - time.time()) < 600
    why = f" ago, of {program}: no zygote of this environment is ready yet"
    assert why in display.stats_text(found) and why in display.stats_html(found)
    assert f"for script {program}: " in display.stats_text(found) and program in display.stats_html(found)


def test_killed_at_any_moment(runtime: Path, tmp_path: Path) -> None:
    """Whatever is killed whenever: a start ends with the program's result or with the signal, and nothing is left."""
    import random

    program = script(tmp_path, "import decimal, sys; print('done'); sys.exit(3)")
    warm(runtime, program)
    chance = random.Random(1)
    for _ in range(10):
        running = subprocess.Popen(overmind_run(program), stdout=subprocess.PIPE, text=True)
        victims = [row["pid"] for row in zygotes(runtime)] + [running.pid]
        for victim in chance.sample(victims, 1):
            with pytest.MonkeyPatch.context(), contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        out, _ = running.communicate(timeout=60)
        assert (running.returncode, out) in ((3, "done\n"), (-9, ""), (-9, "done\n")), (running.returncode, out)
    stop_daemon(runtime)
