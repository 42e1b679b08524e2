# SPDX-License-Identifier: MIT
"""overmind._core: segments, views and their lifetimes, the client against a real daemon, audit recording."""

from __future__ import annotations

import array
import ast
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import overmind
import pytest
from overmind import _core


def segment_of(*payloads: bytes, skeleton: bytes = b"skeleton", meta: bytes = b"{}") -> _core.Segment:
    arrays = [array.array("B", payload) for payload in payloads]
    return _core.make_segment(
        loader="test.loader",
        target="/models/it",
        meta=meta,
        skeleton=skeleton,
        tensors=b"tensors",
        buffers=[item.buffer_info() for item in arrays],
    )


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


class TestSegment:
    def test_gives_back_what_was_put_in(self) -> None:
        segment = segment_of(b"a" * 100, b"b" * 70_000, meta=b'{"x": 1}')
        assert (segment.loader, segment.target, segment.meta) == ("test.loader", "/models/it", b'{"x": 1}')
        assert bytes(segment.skeleton) == b"skeleton"
        assert bytes(segment.tensors) == b"tensors"
        assert segment.buffer_count == 2
        assert bytes(segment.buffer(0)) == b"a" * 100
        assert bytes(segment.buffer(1)) == b"b" * 70_000
        assert segment.nbytes >= 70_100
        assert len(segment.entry_id) == 16
        assert abs(segment.created - time.time()) < 60

    def test_skeleton_is_read_only_and_buffers_are_writable(self) -> None:
        segment = segment_of(b"abcd")
        assert segment.skeleton.readonly and segment.tensors.readonly
        view = segment.buffer(0)
        view[0:1] = b"X"
        assert bytes(segment.buffer(0)) == b"Xbcd"

    def test_buffers_lie_as_their_sources_modulo_64(self) -> None:
        whole = memoryview(b"x" * 70_000)
        parts = [whole[1:4], whole[5:10], whole[12 : 12 + 65536], whole[100:164]]
        places = [_core.buffer_address(part)[:2] for part in parts]
        segment = _core.make_segment(loader="l", target="t", meta=b"{}", skeleton=b"", tensors=b"", buffers=places)
        addresses = [_core.buffer_address(segment.buffer(i))[0] for i in range(len(parts))]
        assert [each % 64 for each in addresses] == [address % 64 for address, _nbytes in places]
        assert addresses[2] % 4096 < 64

    @pytest.mark.parametrize("index", [1, -1, 2**40])
    def test_unknown_buffer(self, index: int) -> None:
        with pytest.raises(IndexError, match="of 1"):
            segment_of(b"abc").buffer(index)

    def test_views_and_capsules_keep_the_mapping(self) -> None:
        gc.collect()  # what the tests before left in cycles
        before = mappings()
        segment = segment_of(b"abc" * 50_000)
        assert mappings() == before + 1
        view, capsule = segment.buffer(0), segment.capsule()
        del segment
        gc.collect()
        assert bytes(view[:3]) == b"abc"
        del view
        assert mappings() == before + 1
        del capsule
        assert mappings() == before

    def test_no_descriptor_is_kept(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        segment = segment_of(b"abc")
        assert len(os.listdir("/proc/self/fd")) == before
        del segment

    def test_needs_neither_torch_nor_numpy(self) -> None:
        code = "import sys; from overmind import _core, skeleton; print({'torch', 'numpy'} & {*sys.modules})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
        assert done.stdout.strip() == "set()"


class TestBufferAddress:
    def test_of_writable_and_readonly(self) -> None:
        items = array.array("i", [1, 2, 3])
        assert _core.buffer_address(items) == (items.buffer_info()[0], 12, False)
        assert _core.buffer_address(b"abc")[1:] == (3, True)

    def test_refuses_gaps(self) -> None:
        with pytest.raises(BufferError):
            _core.buffer_address(memoryview(bytearray(10))[::2])


class TestPickleGlobals:
    def test_finds_exactly_what_the_unpickler_looks_up(self) -> None:
        from collections import Counter, OrderedDict, deque
        from decimal import Decimal
        from pathlib import PurePosixPath

        value = [
            Counter("abca"),
            OrderedDict(x=Decimal(3)),
            deque([PurePosixPath("/a")]),
            {"y": Counter},
            b"x" * 300,
            2**80,
        ]
        value = [
            value,
            value * 200,
            "Decimal",
            "decimal",
            "collections\nCounter",
            pickle.PickleBuffer(b"abc"),
            frozenset("ab"),
        ]

        class Tracking(pickle.Unpickler):
            seen: set[tuple[str, str]] = set()  # noqa: RUF012

            def find_class(self, module: str, name: str) -> Any:
                self.seen.add((module, name))
                return super().find_class(module, name)

        data = pickle.dumps(value, 5)
        tracking = Tracking(io.BytesIO(data))
        tracking.load()
        assert set(_core.pickle_globals(data)) == tracking.seen

    def test_strings_that_look_like_opcodes_are_skipped(self) -> None:
        assert _core.pickle_globals(pickle.dumps(["\x93\x8c.", b"cos\nsystem\n"], 5)) == []

    def test_a_cut_pickle_is_refused(self) -> None:
        data = pickle.dumps([{"a": 1}, "b" * 300, b"c" * 300], 5)
        for length in range(len(data)):
            with pytest.raises(_core.InvalidError):
                _core.pickle_globals(data[:length])

    def test_old_protocols_are_refused(self) -> None:
        from collections import OrderedDict

        with pytest.raises(_core.InvalidError):
            _core.pickle_globals(pickle.dumps(OrderedDict, 2))


class TestRecording:
    def test_opens_listings_and_scans_with_absolute_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("x")
        monkeypatch.chdir(tmp_path)
        _core.start_recording()
        open("file").close()
        open(b"file", "rb").close()
        os.close(os.open(tmp_path / "file", os.O_RDWR))
        os.listdir()
        os.listdir("..")
        with os.scandir(tmp_path):
            pass
        events = _core.stop_recording()
        here = str(tmp_path)
        assert events[:6] == [  # the interpreter's own; what libc was asked for is in test_file_watch.py
            ("open", f"{here}/file", "r"),
            ("open", f"{here}/file", "r"),  # FileIO drops the b
            ("open", f"{here}/file", "r+"),
            ("os.listdir", here, ""),
            ("os.listdir", f"{here}/..", ""),
            ("os.scandir", here, ""),
        ]

    def test_descriptors_are_left_out(self) -> None:
        descriptor = os.open("/", os.O_RDONLY)
        _core.start_recording()
        os.listdir(descriptor)
        os.close(descriptor)
        assert _core.stop_recording() == []

    def test_nested_recordings_belong_to_the_outermost(self, tmp_path: Path) -> None:
        _core.start_recording()
        _core.start_recording()
        os.listdir(tmp_path)
        assert _core.stop_recording() == []
        assert ("os.listdir", str(tmp_path), "") in _core.stop_recording()

    def test_failing_opens_are_recorded_and_fail_as_always(self, tmp_path: Path) -> None:
        _core.start_recording()
        with pytest.raises(FileNotFoundError):
            open(tmp_path / "missing")  # noqa: SIM115
        with pytest.raises(ValueError, match="null"):
            open("a\0b")  # noqa: SIM115
        paths = [path for _, path, _ in _core.stop_recording()]
        assert str(tmp_path / "missing") in paths

    def test_stop_without_start(self) -> None:
        with pytest.raises(RuntimeError, match="start_recording"):
            _core.stop_recording()


def new_client() -> _core.Client:
    config = _core.config()
    config.daemon_path = str(Path(_core.__file__).with_name("overmindd"))
    return _core.Client(config)


@pytest.fixture
def client(runtime: Path) -> _core.Client:
    client = new_client()
    client.connect()
    return client


def key(text: str) -> bytes:
    return text.encode().ljust(32, b"\0")


def publish(client: _core.Client, name: str, payload: bytes, **options: Any) -> _core.Publication:
    lease = client.lookup(key(name))
    assert isinstance(lease, _core.Lease)
    data = array.array("B", payload)
    return client.publish(
        lease,
        loader="test.loader",
        target=name,
        native_seconds=1.5,
        meta=b'{"a": 1}',
        skeleton=b"skeleton",
        tensors=b"tensors",
        buffers=[data.buffer_info()],
        **options,
    )


class TestClient:
    @pytest.mark.parametrize("options", [{}, {"inline_limit": 0}], ids=["in line", "forked"])
    def test_publish_then_hit(self, client: _core.Client, options: dict[str, int]) -> None:
        publication = publish(client, "one", b"payload" * 1000, **options)
        assert publication.wait(20) is True, publication.failure
        assert publication.failure == ""
        hit = client.lookup(key("one"))
        assert isinstance(hit, _core.Segment)
        assert hit.entry_id == publication.entry_id
        assert (hit.loader, hit.target, hit.native_seconds, hit.meta) == ("test.loader", "one", 1.5, b'{"a": 1}')
        assert bytes(hit.buffer(0)) == b"payload" * 1000

    def test_a_write_is_private(self, client: _core.Client) -> None:
        publish(client, "one", b"abcd").wait(20)
        first, second = client.lookup(key("one")), client.lookup(key("one"))
        assert isinstance(first, _core.Segment) and isinstance(second, _core.Segment)
        first.buffer(0)[0:2] = b"XX"
        assert bytes(second.buffer(0)) == b"abcd"

    def test_absent_busy_and_released(self, client: _core.Client) -> None:
        assert client.lookup(key("one"), lease=False) is None
        lease = client.lookup(key("one"))
        assert isinstance(lease, _core.Lease)
        other = new_client()
        busy = other.lookup(key("one"))
        assert isinstance(busy, _core.Busy)
        assert not busy.publishing and busy.written == 0 and busy.elapsed >= 0
        lease.release()
        lease.release()
        wait_until(lambda: isinstance(other.lookup(key("one")), _core.Lease))

    def test_a_dropped_lease_object_gives_the_lease_back(self, client: _core.Client) -> None:
        lease = client.lookup(key("one"))
        assert isinstance(lease, _core.Lease)
        del lease
        gc.collect()
        other = new_client()
        wait_until(lambda: isinstance(other.lookup(key("one")), _core.Lease))

    def test_a_lease_is_used_once(self, client: _core.Client) -> None:
        lease = client.lookup(key("one"))
        assert isinstance(lease, _core.Lease)
        arguments: dict[str, Any] = dict(
            loader="l", target="t", native_seconds=0, meta=b"", skeleton=b"s", tensors=b"t", buffers=[]
        )
        client.publish(lease, **arguments)
        with pytest.raises(ValueError, match="used"):
            client.publish(lease, **arguments)

    def test_mapped_by_follows_the_last_view(self, client: _core.Client) -> None:
        publication = publish(client, "one", b"abcd")
        publication.wait(20)
        segment = client.lookup(key("one"))
        assert isinstance(segment, _core.Segment)
        view = segment.buffer(0)
        del segment
        gc.collect()
        assert client.list()[0]["mapped_by"] == 1
        del view
        gc.collect()
        wait_until(lambda: client.list()[0]["mapped_by"] == 0)

    def test_list_stats_pin_drop(self, client: _core.Client) -> None:
        publication = publish(client, "one", b"abcd")
        publication.wait(20)
        (entry,) = client.list()
        assert (entry["id"], entry["target"], entry["key"]) == (publication.entry_id, "one", key("one").hex())
        assert set(keys_of("EntryInfo")) == set(entry)
        client.pin(entry["id"], True)
        assert client.list()[0]["pinned"]
        client.pin(entry["id"], False)
        stats = client.stats()
        assert stats["entries"] == 1 and stats["published"] == 1 and stats["used"] > 0
        assert set(keys_of("StoreStats")) == set(stats)
        client.drop(entry["id"])
        assert client.list() == []
        with pytest.raises(_core.NotFoundError):
            client.drop(entry["id"])
        with pytest.raises(_core.NotFoundError):
            client.open(entry["id"])

    def test_open_and_drop_all(self, client: _core.Client) -> None:
        ids = [publish(client, name, b"abcd").entry_id for name in ("one", "two")]
        wait_until(lambda: len(client.list()) == 2)
        assert client.open(ids[0]).target == "one"
        assert client.drop_all() == 2

    def test_wrong_keys_and_ids(self, client: _core.Client) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            client.lookup(b"short")
        with pytest.raises(_core.InvalidError):
            client.open("not an id")

    def test_waiting_lets_other_threads_run(self, client: _core.Client) -> None:
        lease = client.lookup(key("one"))
        other = new_client()
        ticks: list[object] = []
        waiter = threading.Thread(target=lambda: ticks.append(other.lookup(key("one"), wait=20)))
        waiter.start()
        del lease  # reached only when the waiting thread does not hold the GIL
        waiter.join(20)
        assert len(ticks) == 1 and isinstance(ticks[0], _core.Lease)

    def test_objects_of_the_parent_die_quietly_in_a_fork(self, client: _core.Client) -> None:
        publish(client, "one", b"abcd").wait(20)
        segment, lease = client.lookup(key("one")), client.lookup(key("two"))
        child = os.fork()
        if child == 0:
            del segment, lease
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.list()[0]["mapped_by"] == 1
        assert isinstance(new_client().lookup(key("two")), _core.Busy)


def keys_of(name: str) -> list[str]:
    """Keys of a TypedDict in _core.pyi: what the bindings give must be what they promise."""
    stub = ast.parse((Path(overmind.__file__).parent / "_core.pyi").read_text())
    (found,) = [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [
        item.target.id for item in found.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
