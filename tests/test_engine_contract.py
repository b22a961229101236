"""One contract, every backend: whatever carries the bytes, the file holds exactly them and the CRCs are theirs."""

from __future__ import annotations

import errno
import os
from typing import Any

import crc_reference
import numpy as np
import pytest
from support import SMALL_BLOCK, Bytes, counted, injected, random_bytes

import fp_multi as fp
from fp_multi import _engine, _reader, _staging, _writer
from fp_multi._layout import PAGE, chunk_sizes, plan_reads
from fp_multi._types import LeafSource

BLOCK = SMALL_BLOCK
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7]
MODES = [
    pytest.param({"io_uring": ring, **how}, id=f"{'ring' if ring == 'on' else 'threads'}-{name}")
    for ring in ("on", "off")
    for name, how in {
        "direct": {"direct": "on", "dontcache": "auto"},
        "dontcache": {"direct": "off", "dontcache": "auto"},
        "cached": {"direct": "off", "dontcache": "off"},
    }.items()
]


@pytest.fixture(scope="module")
def engine():
    one = _engine.Engine()
    yield one
    one.close()


@pytest.fixture(params=MODES)
def mode(request, tmp_path):
    asked = request.param
    code, step = _engine.probe_io_uring()
    if asked["io_uring"] == "on" and code:
        pytest.skip(f"no io_uring here: {step}: errno {code}")
    if asked["direct"] == "on" and not fp.capabilities(tmp_path)["direct"]:
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    return {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, **asked}


def table_of(arrays: list[np.ndarray]) -> tuple[np.ndarray, list[tuple[int, list[int], list[int]]]]:
    """The engine's description of arrays of any strides."""
    rows, layouts = [], []
    for array in arrays:
        layout = 0
        if not array.flags.c_contiguous:
            layouts.append((array.itemsize, list(array.shape), list(array.strides)))
            layout = len(layouts)
        rows.append((array.__array_interface__["data"][0], array.nbytes, layout))
    return np.array(rows, np.uint64).reshape(-1, 3), layouts


def write(engine: _engine.Engine, path: Any, arrays: list[np.ndarray], mode: dict[str, Any], **more: Any) -> Any:
    """Write arrays one behind the other; returns the finished job."""
    table, layouts = table_of(arrays)
    nbytes = sum(array.nbytes for array in arrays)
    chunks = list(chunk_sizes(nbytes, more.pop("chunk_bytes", 3 * 4096)))
    job = engine.submit_write(
        str(path), table, np.array(chunks, np.uint64), layouts, durable=more.pop("durable", False), **more, **mode
    )
    job.wait()
    assert job.error is None
    assert job.moved_nbytes == job.staged_nbytes == nbytes
    return job


def crcs_of(data: bytes, sizes: list[int], crc: Any = _engine.crc32c_portable) -> list[int]:
    out, at = [], 0
    for size in sizes:
        out.append(crc(data[at : at + size]))
        at += size
    return out


def check_file(path: Any, job: Any, data: bytes, chunk_bytes: int = 3 * 4096) -> None:
    assert path.read_bytes() == data
    assert np.frombuffer(job.crcs(), np.uint32).tolist() == crcs_of(data, list(chunk_sizes(len(data), chunk_bytes)))


def check_mode(job: Any, mode: dict[str, Any]) -> None:
    assert job.stats["engine"] == ("io_uring" if mode["io_uring"] == "on" else "threads")
    assert job.stats["direct"] == (mode["direct"] == "on")


@pytest.mark.parametrize("nbytes", SIZES)
def test_written_bytes(engine, mode, tmp_path, nbytes):
    data = random_bytes(nbytes, nbytes)
    job = write(engine, tmp_path / "f", [data], mode, durable=True)
    check_mode(job, mode)
    check_file(tmp_path / "f", job, data.tobytes())


@pytest.mark.parametrize("nbytes", SIZES)
def test_read_bytes(engine, mode, tmp_path, nbytes):
    data = random_bytes(nbytes, nbytes)
    (tmp_path / "f").write_bytes(data)
    memory, job, sizes = read(engine, tmp_path / "f", nbytes, mode)
    check_mode(job, mode)
    assert memory.tobytes() == data.tobytes()
    assert np.frombuffer(job.crcs(), np.uint32).tolist() == crcs_of(data.tobytes(), sizes)


def read(
    engine: _engine.Engine, path: Any, nbytes: int, mode: dict[str, Any], shift: int = 0
) -> tuple[Bytes, Any, list[int]]:
    """Read a whole file to page-aligned memory (plus ``shift``)."""
    memory = _engine.allocate(nbytes + shift)[shift:]
    address = memory.__array_interface__["data"][0]
    segments = np.array([[0, nbytes, address]][: 1 if nbytes else 0], np.int64).reshape(-1, 3)
    sizes = list(chunk_sizes(nbytes, 3 * 4096))
    begins = np.cumsum([0, *sizes])[:-1]
    chunks = np.column_stack([begins, sizes]).astype(np.int64).reshape(-1, 2)
    ops = plan_reads(segments, chunks, BLOCK, nbytes)
    job = engine.submit_read(
        str(path), ops.astype(np.uint64), segments.astype(np.uint64), chunks.astype(np.uint64), **mode
    )
    job.wait()
    assert job.error is None
    return memory, job, sizes


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_reads_straight_and_through_blocks_are_the_same(engine, mode, tmp_path, shift):
    nbytes = 10 * BLOCK  # straight to memory only where the memory is aligned
    data = random_bytes(nbytes)
    (tmp_path / "f").write_bytes(data)
    memory, job, sizes = read(engine, tmp_path / "f", nbytes, mode, shift)
    assert memory.tobytes() == data.tobytes()
    assert np.frombuffer(job.crcs(), np.uint32).tolist() == crcs_of(data.tobytes(), sizes)


def test_scattered_parts(engine, mode, tmp_path):
    data = random_bytes(40 * BLOCK, 1)
    (tmp_path / "f").write_bytes(data)
    rng = np.random.default_rng(2)
    edges = np.sort(rng.choice(data.nbytes, 240, replace=False))
    parts = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    memory = [np.zeros(b - a, np.uint8) for a, b in parts]
    segments = np.array(
        [(a, b - a, m.__array_interface__["data"][0]) for (a, b), m in zip(parts, memory, strict=True)], np.int64
    )
    ops = plan_reads(segments, np.empty((0, 2), np.int64), BLOCK, data.nbytes)
    job = engine.submit_read(
        str(tmp_path / "f"), ops.astype(np.uint64), segments.astype(np.uint64), np.empty((0, 2), np.uint64), **mode
    )
    job.wait()
    assert job.error is None
    for (a, b), found in zip(parts, memory, strict=True):
        assert found.tobytes() == data[a:b].tobytes()


def strided_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, 400_000, np.uint8)
    return {
        "transposed": base[:200_000].view(np.float32).reshape(125, 400).T,
        "reversed": base[:80_000].view(np.int64)[::-1],
        "reversed-both": base[:90_000].view(np.int16).reshape(150, 300)[::-1, ::-1],
        "every-third": base[:240_000].view(np.float64)[::3],
        "broadcast": np.broadcast_to(base[:400].view(np.int32), (300, 100)),
        "broadcast-inner": np.broadcast_to(base[:7].reshape(7, 1), (7, 20_000)),
        "one-element-everywhere": np.broadcast_to(base[:8].view(np.complex64), (17_000,)),
        "fortran-3d": np.asfortranarray(base[:96_000].view(np.int32).reshape(20, 30, 40)),
        "middle-axis": base[:300_000].view(np.int16).reshape(50, 60, 50)[:, ::2, :],
        "itemsize-3": base[:390_000].view("V3").reshape(325, 400).T,
        "itemsize-7": base[:280_000].view("S7").reshape(200, 200)[::-1, ::2],
        "itemsize-16": base[:320_000].view(np.complex128)[::2],
        "length-1-axes": base[:120_000].view(np.int32).reshape(1, 300, 1, 100)[:, ::3, :, ::2],
        "windows": np.lib.stride_tricks.sliding_window_view(base[:700], 350),
        "diagonal": base[:156_800].view(np.int16).reshape(280, 280).diagonal(),
    }


@pytest.mark.parametrize("copy_threads", [1, 3])
@pytest.mark.parametrize("name", strided_arrays())
def test_strided_sources_are_written_in_c_order(engine, tmp_path, name, copy_threads):
    array = strided_arrays()[name]
    assert not array.flags.c_contiguous
    lead = random_bytes(5)  # so that elements straddle the edges of blocks and chunks
    mode = {"io_uring": "auto", "direct": "auto", "dontcache": "auto", "queue_depth": 3, "copy_threads": copy_threads}
    for block_bytes in (BLOCK, 1 << 20):
        path = tmp_path / str(block_bytes)
        job = write(engine, path, [lead, array, lead], {**mode, "block_bytes": block_bytes})
        check_file(path, job, lead.tobytes() + array.tobytes() + lead.tobytes())


def test_strided_sources_in_every_mode(engine, mode, tmp_path):
    arrays = [random_bytes(3), *strided_arrays().values()]
    job = write(engine, tmp_path / "f", arrays, mode)
    check_file(tmp_path / "f", job, b"".join(a.tobytes() for a in arrays))


def test_thousands_of_tiny_extents(engine, mode, tmp_path):
    rng = np.random.default_rng(4)
    arrays = [random_bytes(int(n), i) for i, n in enumerate(rng.integers(0, 38, 6000))]
    job = write(engine, tmp_path / "f", arrays, mode, chunk_bytes=4096)
    check_file(tmp_path / "f", job, b"".join(a.tobytes() for a in arrays), 4096)


@pytest.mark.parametrize("copy_threads", [1, 2, 3, 8])
def test_copy_threads_change_nothing(engine, mode, tmp_path, copy_threads):
    data = random_bytes((5 << 20) + 4321)
    many = {**mode, "block_bytes": 2 << 20, "copy_threads": copy_threads}
    job = write(engine, tmp_path / "f", [data[:1_000_001], data[1_000_001:]], many, chunk_bytes=1 << 20)
    check_file(tmp_path / "f", job, data.tobytes(), 1 << 20)
    memory, job, sizes = read(engine, tmp_path / "f", data.nbytes, {**mode, "copy_threads": copy_threads})
    assert memory.tobytes() == data.tobytes()
    assert np.frombuffer(job.crcs(), np.uint32).tolist() == crcs_of(data.tobytes(), sizes)


def test_crcs_are_the_reference_ones(engine, mode, tmp_path):
    data = random_bytes(BLOCK + 999, 9)
    job = write(engine, tmp_path / "f", [data[:777], data[777:]], mode, chunk_bytes=4096)
    expected = crcs_of(data.tobytes(), list(chunk_sizes(data.nbytes, 4096)), crc_reference.crc32c)
    assert np.frombuffer(job.crcs(), np.uint32).tolist() == expected


@pytest.mark.parametrize("old_nbytes", [0, 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 5, 9 * BLOCK + 1])
def test_reuse_overwrites_in_place_and_cuts_to_length(engine, mode, tmp_path, old_nbytes):
    (tmp_path / "f").write_bytes(random_bytes(old_nbytes, 1))
    inode = (tmp_path / "f").stat().st_ino
    data = random_bytes(3 * BLOCK + 5, 2)
    job = write(engine, tmp_path / "f", [data], mode, reuse=True, durable=True)
    check_file(tmp_path / "f", job, data.tobytes())
    assert (tmp_path / "f").stat().st_ino == inode


def test_a_new_file_never_overwrites(engine, mode, tmp_path):
    (tmp_path / "f").write_bytes(b"precious")
    table, layouts = table_of([random_bytes(10)])
    job = engine.submit_write(str(tmp_path / "f"), table, np.array([10], np.uint64), layouts, **mode)
    job.wait()
    code, op, path, *_ = job.error
    assert (code, op, path) == (17, "open", str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == b"precious"


def test_the_same_arrays_give_the_same_file(engine, mode, tmp_path):
    arrays = [random_bytes(3 * BLOCK + 11, 5), np.asfortranarray(random_bytes(60_000, 6).reshape(200, 300))]
    first = write(engine, tmp_path / "a", arrays, mode)
    second = write(engine, tmp_path / "b", arrays, {**mode, "copy_threads": 3})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert first.crcs() == second.crcs()


def test_many_jobs_queue_on_one_engine(engine, mode, tmp_path):
    data = [random_bytes(BLOCK + i, i) for i in range(20)]
    jobs = []
    for i, one in enumerate(data):
        table, layouts = table_of([one])
        chunks = np.array([one.nbytes], np.uint64)
        jobs.append(engine.submit_write(str(tmp_path / str(i)), table, chunks, layouts, durable=False, **mode))
    for i, job in enumerate(jobs):
        assert job.wait(30.0)
        check_file(tmp_path / str(i), job, data[i].tobytes(), BLOCK + 20)


def test_a_job_dropped_unfinished_lets_go_of_its_memory(engine, tmp_path):
    mode = {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, "io_uring": "auto", "direct": "auto"}
    for i in range(20):
        data = random_bytes(40 * BLOCK, i)
        table, layouts = table_of([data])
        engine.submit_write(
            str(tmp_path / str(i)),
            table,
            np.array([data.nbytes], np.uint64),
            layouts,
            dontcache="auto",
            keepalive=data,
            **mode,
        )
        del data


def test_offsets_beyond_4_gib(engine, mode, tmp_path):
    where = (1 << 32) - 3 * PAGE
    data = random_bytes(6 * PAGE)
    with open(tmp_path / "f", "wb") as file:
        file.seek(where)
        file.write(data)
    memory = np.zeros(data.nbytes, np.uint8)
    segments = np.array([[where, data.nbytes, memory.__array_interface__["data"][0]]], np.int64)
    chunks = segments[:, :2]
    crcs, moved_nbytes = _reader.read_ranges(
        str(tmp_path / "f"),
        where + data.nbytes,
        segments,
        chunks,
        fp.LoadConfig(block_bytes=BLOCK, **{k: mode[k] for k in ("io_uring", "direct", "dontcache")}),
    )
    assert memory.tobytes() == data.tobytes()
    assert crcs.tolist() == [_engine.crc32c(data.tobytes())]
    assert data.nbytes <= moved_nbytes <= data.nbytes + 2 * 4096


def host_source(array: np.ndarray) -> LeafSource:
    return LeafSource(
        dtype=str(array.dtype),
        shape=array.shape,
        nbytes=array.nbytes,
        address=array.__array_interface__["data"][0],
        keepalive=array,
        strides=None if array.flags.c_contiguous else array.strides,
        itemsize=array.itemsize,
    )


def test_writer_and_reader_agree(mode, tmp_path):
    header = bytes(random_bytes(PAGE))
    arrays = [random_bytes(5 * BLOCK), random_bytes(0), np.arange(50_000)[::-2], random_bytes(77)]
    settings = {k: v for k, v in mode.items() if k != "copy_threads"}
    config = fp.SaveConfig(chunk_bytes=16 << 10, durable=False, **settings)
    path = str(tmp_path / "f")
    write = _writer.start_write(path, header, [host_source(a) for a in arrays], config)
    crcs = write.checksums()
    receipt = write.finish()
    whole = header + b"".join(a.tobytes() for a in arrays)
    assert receipt.nbytes == len(whole)
    sizes = [len(header)]
    for array in arrays:
        sizes.extend(chunk_sizes(array.nbytes, 16 << 10))
    assert crcs == crcs_of(whole, sizes)

    buffers = _reader.allocate([len(whole)])
    segments = np.array([[0, len(whole), _reader.addresses(buffers)[0]]], np.int64)
    chunks = np.column_stack([np.cumsum([0, *sizes])[:-1], sizes]).astype(np.int64)
    seen: list[int] = []
    shuffled = np.random.default_rng(7).permutation(len(chunks))
    found, _ = _reader.read_ranges(path, len(whole), segments, chunks[shuffled], fp.LoadConfig(**settings), seen.append)
    assert buffers[0].tobytes() == whole
    assert found.tolist() == [crcs[i] for i in shuffled]
    assert all(0 <= n <= len(whole) + PAGE for n in seen)


def test_the_page_cache_is_used_where_the_file_is_in_it(tmp_path):
    data = random_bytes(20 * BLOCK)
    (tmp_path / "f").write_bytes(data)
    mode = {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, "io_uring": "auto", "dontcache": "auto"}
    engine = _engine.Engine()
    memory, job, _ = read(engine, tmp_path / "f", data.nbytes, {**mode, "direct": "auto"})
    engine.close()
    assert memory.tobytes() == data.tobytes()
    assert not job.stats["direct"]
    assert any("page cache" in reason or "direct" in reason for reason in job.stats["reasons"])


@pytest.mark.parametrize(("wanted", "shared"), [(0.25, True), (0.9, False)])
def test_columns_leave_the_rows_in_the_page_cache(engine, tmp_path, wanted, shared):
    if not fp.capabilities(tmp_path)["direct"]:
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    data = random_bytes(10 << 20)
    with open(tmp_path / "f", "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    row = 64 << 10
    begins = np.arange(0, data.nbytes, row)
    width = int(wanted * row)
    memory = np.zeros((len(begins), width), np.uint8)
    places = memory.__array_interface__["data"][0] + width * np.arange(len(begins))
    segments = np.column_stack([begins, np.full(len(begins), width), places])
    ops = plan_reads(segments, np.empty((0, 2), np.int64), BLOCK, data.nbytes)
    mode = {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, "direct": "auto", "dontcache": "auto"}
    nothing = np.empty((0, 2), np.uint64)
    job = engine.submit_read(
        str(tmp_path / "f"), ops.astype(np.uint64), segments.astype(np.uint64), nothing, io_uring="auto", **mode
    )
    job.wait()
    assert job.error is None
    assert memory.tobytes() == data.reshape(-1, row)[:, :width].tobytes()
    assert job.stats["direct"] != shared
    assert any("not wanted here" in reason for reason in job.stats["reasons"]) == shared


@pytest.mark.parametrize("io_uring", ["auto", "off"])
@pytest.mark.parametrize("nbytes", [1, BLOCK, 5 * BLOCK + 7])
def test_the_drive_begins_while_the_page_cache_is_filled(tmp_path, io_uring, nbytes):
    data = random_bytes(nbytes)
    mode = {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, "io_uring": io_uring, "direct": "off"}
    engine = _engine.Engine()
    requests = -(-nbytes // BLOCK)
    for dontcache in ("off", "auto"):
        with counted() as counts:
            job = write(engine, tmp_path / dontcache, [data], {**mode, "dontcache": dontcache}, durable=True)
        check_file(tmp_path / dontcache, job, data.tobytes())
        # With RWF_DONTCACHE the kernel does it.
        by_kernel = dontcache == "auto" and not job.stats["reasons"]
        assert counts["sync_file_range"] == (0 if by_kernel else requests)
    with injected("sync_file_range", at=1, times=100, error=errno.EIO):  # fdatasync is what counts
        job = write(engine, tmp_path / "faulty", [data], {**mode, "dontcache": "off"}, durable=True)
    check_file(tmp_path / "faulty", job, data.tobytes())
    engine.close()


def test_memory_for_loaded_tensors():
    big = _reader.allocate([0, 1, 4097, 3 << 20, 5 << 20])
    assert [b.nbytes for b in big] == [0, 1, 4097, 3 << 20, 5 << 20]
    for buffer, address in zip(big, _reader.addresses(big).tolist(), strict=True):
        assert buffer.nbytes == 0 or address == buffer.__array_interface__["data"][0]
        if buffer.nbytes >= 1 << 20:
            assert address % PAGE == 0
            buffer[-1] = 7  # its own, writable to the last byte


def test_bad_requests_are_refused_before_they_run(engine, tmp_path):
    good = {
        "block_bytes": BLOCK,
        "queue_depth": 3,
        "copy_threads": 1,
        "io_uring": "auto",
        "direct": "auto",
        "dontcache": "auto",
    }
    table, _ = table_of([random_bytes(10)])
    ten = np.array([10], np.uint64)
    for bad in ({"block_bytes": 1000}, {"queue_depth": 0}, {"queue_depth": 65}, {"copy_threads": 0}, {"direct": "yes"}):
        with pytest.raises(ValueError, match=r"out of range|capability"):
            engine.submit_write(str(tmp_path / "f"), table, ten, [], **{**good, **bad})
    with pytest.raises(ValueError, match="cover"):
        engine.submit_write(str(tmp_path / "f"), table, np.array([11], np.uint64), [], **good)
    with pytest.raises(ValueError, match="layout"):
        engine.submit_write(str(tmp_path / "f"), np.array([[1, 10, 1]], np.uint64), ten, [], **good)
    big = np.array([[0, BLOCK + 1, 0]], np.uint64)
    with pytest.raises(ValueError, match="block"):
        engine.submit_read(str(tmp_path / "f"), big, np.empty((0, 3), np.uint64), np.empty((0, 2), np.uint64), **good)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_takes_no_jobs(tmp_path):
    engine = _engine.Engine()
    assert engine.usable
    engine.close()
    engine.close()
    assert not engine.usable
    mode = {"block_bytes": BLOCK, "queue_depth": 3, "copy_threads": 1, "io_uring": "auto"}
    with pytest.raises(RuntimeError, match="closed"):
        write(engine, tmp_path / "f", [random_bytes(1)], {**mode, "direct": "auto", "dontcache": "auto"})


def test_extents_of_host_and_strided_sources_are_described_in_file_order():
    arrays = [np.arange(10), np.arange(12).reshape(3, 4).T, np.empty((0, 3))]
    parts = _staging.extents(b"header", [host_source(a) for a in arrays], BLOCK)
    assert parts.table[:, 1].tolist() == [6, 80, 96, 0]
    assert parts.table[:, 2].tolist() == [0, 0, 1, 0]
    assert parts.layouts == [(8, [4, 3], [8, 32])]
    assert parts.ready_nbytes == (1 << 64) - 1


@pytest.mark.slow
def test_a_tensor_of_more_than_4_gib(engine, mode, tmp_path):
    # One row again and again: 4.1 GiB in the file, 4 KiB in memory.
    row = random_bytes(4096)
    array = np.broadcast_to(row, ((1 << 20) + 25_000, 4096))
    big = {**mode, "block_bytes": 4 << 20}
    job = write(engine, tmp_path / "f", [random_bytes(3), array], big, chunk_bytes=16 << 20)
    with open(tmp_path / "f", "rb") as file:
        for index in (0, 1 << 20, array.shape[0] - 1):
            file.seek(3 + 4096 * index)
            assert file.read(4096) == row.tobytes()
    sizes = list(chunk_sizes(3 + array.nbytes, 16 << 20))
    assert len(np.frombuffer(job.crcs(), np.uint32)) == len(sizes)
    with open(tmp_path / "f", "rb") as file:
        file.seek((len(sizes) - 2) * (16 << 20))
        last = file.read(16 << 20)
    assert np.frombuffer(job.crcs(), np.uint32)[-2] == _engine.crc32c(last)
