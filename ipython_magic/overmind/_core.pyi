"""The store as Python sees it: thin bindings of core/client.h. Imports neither torch nor numpy.

Every method releases the GIL while it waits. Errors are the exceptions below, one per core Code;
kernel_ext/errors.cc holds the table.
"""

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypedDict, final

__version__: str

class OvermindError(RuntimeError): ...
class NotFoundError(OvermindError): ...
class UnavailableError(OvermindError): ...
class ExhaustedError(OvermindError): ...
class DeniedError(OvermindError): ...
class InvalidError(OvermindError): ...
class TimeoutError(OvermindError): ...
class VersionError(OvermindError): ...
class IoError(OvermindError): ...

def error(code: str, message: str) -> OvermindError:
    """The exception that stands for a core Code ("exhausted", "denied", ...). ValueError for no such code."""

@final
class Config:
    """core/config.h. Attributes may be set before a Client is made."""

    disabled: bool
    zygote: bool
    runtime_dir: str
    budget: str
    log_level: str
    daemon_path: str
    idle_exit_seconds: float
    @property
    def instance_dir(self) -> str: ...
    @property
    def events_path(self) -> str: ...
    @property
    def log_path(self) -> str: ...
    @property
    def launcher_log_path(self) -> str: ...

def config() -> Config:
    """Reads the environment now. InvalidError names a variable that can't be understood."""

@final
class Segment:
    """A private, writable mapping of one committed entry; lives as long as anything made from it."""

    @property
    def entry_id(self) -> str: ...
    @property
    def loader(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def native_seconds(self) -> float: ...
    @property
    def created(self) -> float: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def skeleton(self) -> memoryview:
        """Read-only view; keeps the mapping alive."""
    @property
    def tensors(self) -> memoryview: ...
    @property
    def buffer_count(self) -> int: ...
    def attach(
        self, files: Sequence[tuple[str, int, int, int, int, int]], borrowed: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Puts borrowed buffers in their places: files are (path, dev, ino, size, mtime_ns, ctime_ns), borrowed are
        (buffer, file, offset, nbytes). Before capsule() and buffer(). InvalidError if a file is not that one."""
    def buffer(self, index: int) -> memoryview:
        """Writable view of this process's own pages; keeps the mapping alive. IndexError."""
    def capsule(self) -> object:
        """PyCapsule of kernel_ext/segment_capsule.h, for overmind._torch."""

def make_segment(
    *, loader: str, target: str, meta: bytes, skeleton: bytes, tensors: bytes, buffers: Sequence[tuple[int, int]]
) -> Segment:
    """Plans, writes, seals and maps a segment of this process alone: no daemon, no entry."""

def buffer_address(buffer: Any) -> tuple[int, int, bool]:
    """(address, nbytes, read-only) of a C-contiguous buffer, valid while `buffer` lives. BufferError."""

def pickle_globals(pickle: bytes) -> list[tuple[str, str]]:
    """(module, qualified name) of every global that a protocol 4 or 5 pickle refers to, without running it: 2 ms for
    the skeleton of a diffusers pipeline. InvalidError for a pickle that can't be followed to its end,
    or that rebuilds an object from arguments that hold the object itself."""

def identities(holder: type | ModuleType | dict[Any, Any] | FunctionType) -> bytes:
    """The addresses of the values in the namespace of a class or module, or in a dict, in its order; of functions, and
    of what these wrap, their code and each default as well; of a class its bases, and the functions in its properties
    and the like; of a module not the modules in it, which come as they are imported. Of a function the same alone.
    Alike as long as none is set, deleted or added. Owns none of them: once a value is freed its address may be another
    one's."""

def notable(
    holder: type | ModuleType | dict[Any, Any],
    own: dict[str, Any],
    quiet: set[str],
    tops: frozenset[str],
    silent: set[type],
    only: set[type] | None,
    unsaid: set[str],
    lines: list[str],
) -> list[tuple[Any, Any]]:
    """(name, value) of the same namespace, but for functions whose globals are `own` (unless they were not written in
    its `__file__`), classes and functions (with all that these wrap) of modules in `quiet` or of packages in `tops`,
    class methods, properties and caches made of such functions, values of types in `silent`, members of a class that
    `unsaid` names, and a module's own `__names__`. `only`: nor values of other types than these, classes and functions.
    A tuple in a dict stands for its first part. Adds to `quiet` the modules that it finds in `tops`, and to `lines`
    what numbers, strings and None stand in a class, or are the defaults of its functions and of all that these wrap, in
    place of returning those; what has other defaults is returned."""

def trimmed_state(state: dict[str, Any], standard: tuple[tuple[str, type | None], ...]) -> dict[str, Any] | None:
    """A copy of `state` without the containers that are empty, of the type that `standard` says, and referred to by
    nothing but `state`. None if it does not begin with the names of `standard`, in that order."""

def new_module(kind: type[Any], /) -> Any:
    """Pickle's call on a hit: `kind.__new__(kind)` with the names and empty containers of nn_modules.tables(), in their
    order; the state comes after. What it raises is what `kind.__new__` raises."""

def holds_only(table: dict[Any, Any] | list[Any], kinds: Iterable[type]) -> bool:
    """Whether every key and value, or every part, is exactly of one of these types; a list may hold tuples of such."""

@final
class CollectorOff:
    """Context manager: no garbage collection. At its end all young objects go into the oldest generation, if there are
    5,000 of them and `may_age`; every 400,000 of them are followed by a full collection. One use."""

    def __init__(self, may_age: bool) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

@final
class YoungOnly:
    """Context manager for all threads at once: the youngest generation alone is collected, until the last has left.
    Ends as CollectorOff, with the thresholds as they were. A second one would not know of the first."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def in_child(self) -> None:
        """After a fork: nothing goes on here."""

@final
class Lease:
    """Right to load and publish one key. Abandoned when released, or when its process dies."""

    def release(self) -> None: ...

@final
class Busy:
    publishing: bool
    elapsed: float
    native_seconds: float
    written: int
    total: int
    bytes_per_second: float

@final
class Publication:
    @property
    def entry_id(self) -> str: ...
    @property
    def failure(self) -> str: ...
    def wait(self, timeout: float) -> bool | None:
        """True: committed. False: failed, see `failure`. None: still running after `timeout` seconds."""

class EntryInfo(TypedDict):
    id: str
    key: str
    loader: str
    target: str
    nbytes: int
    created: float
    last_used: float
    native_seconds: float
    hits: int
    mapped_by: int
    pinned: bool

class StoreStats(TypedDict):
    budget: int
    used: int
    pinned: int
    mapped: int
    reserved: int
    entries: int
    hits: int
    misses: int
    published: int
    evicted: int
    refused: int
    uptime_seconds: float
    native_seconds_served: float
    daemon_pid: int
    daemon_rss: int
    version: str

@final
class Client:
    """Thread-safe; survives a fork (the child connects anew)."""

    def __init__(self, config: Config) -> None: ...
    def connect(self, start: bool = True) -> None: ...
    def lookup(self, key: bytes, lease: bool = True, wait: float = 0.0) -> Segment | Lease | Busy | None:
        """`key` is 32 bytes. None: not there, and no lease was asked for."""
    def used(self, entry_id: str) -> None:
        """Counts a hit: what lookup() found was of use. Does not wait; lost with the connection."""
    def publish(
        self,
        lease: Lease,
        *,
        loader: str,
        target: str,
        native_seconds: float,
        meta: bytes,
        skeleton: bytes,
        tensors: bytes,
        buffers: Sequence[tuple[int, int]],
        inline_limit: int = ...,
    ) -> Publication:
        """`buffers`: (address, nbytes) of live memory. It is read before this returns (small results) or in a
        forked copy of this process: the caller may let go of it, or change it, afterwards. Consumes `lease`."""
    def list(self) -> list[EntryInfo]: ...
    def stats(self) -> StoreStats: ...
    def open(self, entry_id: str) -> Segment: ...
    def drop(self, entry_id: str) -> None: ...
    def drop_all(self) -> int: ...
    def pin(self, entry_id: str, pinned: bool) -> None: ...
    def stop(self) -> None: ...

# What a load opens: see kernel_ext/file_watch.h.
def start_recording() -> None:
    """Collects what this thread opens and lists, and what other threads open meanwhile. Nests by counting."""

def stop_recording() -> list[tuple[str, str, str]]:
    """(event, path, mode) of the outermost recording, the interpreter's own first, then what libc was asked for; path
    made absolute against the cwd at the event. Integer descriptors are left out. ("process", audit event, "") where
    another process was started. Empty for inner recordings."""

def stop_watching() -> None:
    """Gives libc's functions back to who imported them, unless a recording runs. The next recording takes them."""

def find_borrowable(buffers: Sequence[tuple[int, int]], min_size: int) -> list[tuple[int, int, int, int]]:
    """(index, st_dev, st_ino, offset) of each buffer, (address, nbytes), of at least `min_size` bytes that lies in a
    private mapping of a file and was never written. Leaves out what can't be proved."""

def files_mapped_for_writing() -> list[tuple[int, int]]:
    """(st_dev, st_ino) of the files of which this process has a shared writable mapping."""

def available_memory() -> int:
    """Bytes that this process's cgroup and the machine can still give (core/config.h)."""

def run_file(path: str, hook: object, *ignored: object) -> None:
    """As sys.excepthook of an exception that leaves the main module: runs `path` as `python path` would, with no Python
    frame below it, and exits. Returns if the program failed: the interpreter then ends with 1, or by SIGINT."""

def run_call(function: Callable[[], object], hook: object, *ignored: object) -> None:
    """The same for a call, as `python -m` makes one of runpy."""

def run_kernel(function: Callable[[], object], hook: object, *ignored: object) -> None:
    """The same for a kernel. When it returns or exits with 0, and report_exit() was told `last`, the interpreter's own
    clearing is left out: all objects of modules are gone by then."""

def report_exit(fd: int, last: bool) -> None:
    """Sends "exit CODE" on the socket `fd` when this process, and no fork of it, calls exit(). `last`: the exit
    handlers that C libraries had registered before are left out."""

def keep_forever(value: object) -> None:
    """Not even the end of the interpreter frees it."""
