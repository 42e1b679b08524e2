# SPDX-License-Identifier: MIT
"""A script with a case for each thing that a program can see of its start; test_run.py runs it with and without a
zygote and compares. `python run_cases.py CASE [ARGUMENT]...`"""

import atexit
import json
import os
import signal
import sys


class Thing:
    """To be pickled."""

    def __init__(self, value):
        self.value = value

    def __del__(self):
        if self.value == "gone":
            print("a global is gone")


def double(x):
    return 2 * x


def argv():
    print(sys.argv, sys.path[0], __file__, __name__, __spec__, __doc__[:8], sorted(globals())[:12])
    print(
        type(__loader__).__name__, __loader__.path, __builtins__.__name__, sys.modules["__main__"].__dict__ is globals()
    )


def frames():
    import traceback

    print([frame.f_code.co_name for frame in _stack()])
    traceback.print_stack()


def _stack():
    frame, found = sys._getframe(1), []
    while frame:
        found.append(frame)
        frame = frame.f_back
    return found


def modules():
    before = set(sys.modules)
    import decimal

    print(sorted(name for name in set(sys.modules) - before if name[0] != "_" and name != "collections.abc"))
    print([name in sys.modules for name in ("socket", "json", "decimal", "select", "fractions", "xml.dom", "hashlib")])
    print(decimal.__spec__.loader.__class__.__name__, decimal.__loader__ is decimal.__spec__.loader)


def streams():
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        print(
            stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines, stream.line_buffering,
            stream.write_through, stream.isatty(), stream.fileno(), stream.seekable(), type(stream.buffer).__name__,
        )  # fmt: skip
    print(sys.__stdout__ is sys.stdout, repr(sys.stdin), repr(sys.stdout))


def stdin():
    print(repr(sys.stdin.readline()), repr(sys.stdin.buffer.read(3)), len(sys.stdin.read()))


def exit_code():
    sys.exit(int(sys.argv[2]))


def exit_text():
    sys.exit("a text")


def exit_none():
    atexit.register(print, "at exit")
    raise SystemExit


def hard_exit():
    print("not flushed", end="")
    os._exit(9)


def killed():
    print("flushed", flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))


def interrupted():
    atexit.register(print, "at exit")
    signal.raise_signal(signal.SIGINT)


def error():
    try:
        {}["missing"]
    except KeyError as cause:
        raise RuntimeError("chained") from cause


def hook():
    def own(kind, value, trace):
        print("hook", kind.__name__, value, trace.tb_frame.f_code.co_name, sys.last_value is value)

    sys.excepthook = own
    raise ValueError("for the hook")


def broken_hook():
    def own(*_):
        raise OSError("in the hook")

    sys.excepthook = own
    raise ValueError("for the hook")


def at_exit():
    global kept
    kept = Thing("gone")
    atexit.register(lambda: print("second", "__file__" in globals()))
    atexit.register(print, "first")


def threads():
    import threading

    main = threading.main_thread()
    print(threading.active_count(), main.name, main.ident == threading.get_ident(), main.native_id == os.getpid())
    late = threading.Thread(target=lambda: (threading.Event().wait(0.2), print("late thread")))
    late.start()


def environment():
    print(sorted(os.environ.items()))
    print(list(os.environ)[:5], os.getenv("ONLY_HERE"))
    os.system("echo $ONLY_HERE")
    os.environ["ADDED"] = "yes"
    os.system("echo $ADDED")


def place():
    import time

    print(os.getcwd(), oct(os.umask(0o22)), time.tzname, time.strftime("%H:%M", time.localtime(0)))


def locales():
    import locale

    print(locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding())


def flags():
    print(sys.flags, sys.executable, sys.prefix, sys.orig_argv[1:], sys.warnoptions, sys._xoptions)
    print(
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        sys.dont_write_bytecode,
        sys.gettrace(),
        sys.ps1 if hasattr(sys, "ps1") else None,
    )
    print([name for name in ("last_type", "last_value", "last_traceback", "last_exc") if hasattr(sys, name)])
    print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)


def signals():
    print({number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals()) if number < 32})
    print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def limits():
    import resource

    print([resource.getrlimit(kind) for kind in range(16)], os.nice(0), sorted(os.sched_getaffinity(0)))


def warning():
    import warnings

    print([(each[0], each[2].__name__, each[3], each[4]) for each in warnings.filters])
    warnings.warn("from the script", stacklevel=2)
    warnings.warn("old", DeprecationWarning, stacklevel=2)


def random_numbers():
    import random
    import uuid

    print(len({random.random(), random.random()}), uuid.uuid4().version, file=sys.stderr)
    print(json.dumps([random.getrandbits(64), str(uuid.uuid4())]))


def descriptors():
    import resource

    opened = os.open("/dev/null", os.O_RDONLY)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)
    print(opened, [fd for fd in range(3, limit - 400) if fd != opened and _is_open(fd)] if limit < 100000 else "")
    os.system("ls /proc/self/fd | wc -l")


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def pickled():
    import pickle

    print(pickle.dumps(Thing(1)), pickle.loads(pickle.dumps(Thing(2))).value)


def processes():
    import multiprocessing
    import rlcompleter

    print(*(module is sys.modules["__main__"] for module in (rlcompleter.__main__, sys.modules["__mp_main__"])))
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            print(method, pool.map(double, range(5)), [each.value for each in pool.map(Thing, range(2))])
    with multiprocessing.Manager() as manager:
        print(list(manager.list([1, 2])))


def working_folder():
    import multiprocessing.process

    try:
        print(os.getcwd())
    except OSError as error:
        print(type(error).__name__, multiprocessing.process.ORIGINAL_DIR)


def pool():
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1) as executor:
        print(list(executor.map(double, [1, 2])))


def fork_exit():
    pid = os.fork()
    if pid == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit(3)


def loops():
    import asyncio

    async def main():
        await asyncio.sleep(0)
        return "ran"

    print(asyncio.run(main()))


def logs():
    import logging

    logging.warning("to stderr")
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("x").info("also")
    print(logging.getLogger().handlers)


def imports_of_main():
    import __main__

    print(__main__.double(4), Thing.__module__)


def self_import():
    import run_cases

    print(run_cases.double is double, run_cases.__file__ == __file__)


def trees():
    import xml

    print(hasattr(xml, "dom"))
    import xml.dom.minidom

    print(hasattr(xml, "dom"), xml.dom.minidom.parseString("<a/>").toxml())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
