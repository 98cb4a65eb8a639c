"""Measure checksums and this disk's speed with large files: ``python -m tests.benchmarks.measure_checksums OUT.csv``.

Needs awscrt and xxhash to compare them too. A row an algorithm and number of threads, over blocks of 32 MiB: GiB/s, and
the share of its speed that a Python loop keeps beside one thread (0: the function holds the lock). Then a row a way
to write a file and force it to the disk, and to read it with a cold page cache.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import mmap
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bootstrap.training.stores import LocalStore

BLOCK_BYTES = 32 * 2**20
THREADS = (1, 4, 8)
COLUMNS = ("what", "threads", "gib_per_s", "loop_share")


def algorithms() -> dict[str, Callable[[memoryview], object]]:
    """Checksums that are installed here."""
    found: dict[str, Callable[[memoryview], object]] = {
        name: lambda view, name=name: hashlib.new(name, view).digest()  # type: ignore[misc]
        for name in ("sha256", "sha1", "blake2b")
    }
    found["crc32 (zlib)"] = zlib.crc32
    try:
        from awscrt import checksums

        found["crc32c (awscrt)"], found["crc64nvme (awscrt)"] = checksums.crc32c, checksums.crc64nvme
    except ImportError:
        pass
    try:
        from xxhash import xxh3_64_intdigest

        found["xxh3 of 64 bits (xxhash)"] = xxh3_64_intdigest
    except ImportError:
        pass
    return found


def best_s(work: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of several calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def over_blocks(function: Callable[[memoryview], object], view: memoryview, threads: int) -> None:
    """Call the function with every block."""
    blocks = [view[start : start + BLOCK_BYTES] for start in range(0, view.nbytes, BLOCK_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, blocks))


def loop_rate(seconds: float) -> float:
    """Rounds a second of a Python loop, for at least so many seconds."""
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        rounds += 1
    return rounds / (time.perf_counter() - began)


def loop_share(function: Callable[[memoryview], object], view: memoryview) -> float:
    """Speed of a Python loop beside the function over its speed alone."""
    alone, is_over = loop_rate(0.3), threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            function(view)

    thread = threading.Thread(target=repeat)
    thread.start()
    beside = loop_rate(0.3)
    is_over.set()
    thread.join()
    return beside / alone


def disk_rows(folder: Path, view: memoryview) -> list[tuple[str, int, float]]:
    """What, threads and seconds: durable writes and cold reads of one file."""
    rows = []
    file = folder / "plain"

    def write_plainly() -> None:
        with file.open("wb") as out:
            out.write(view)
            os.fsync(out.fileno())

    rows.append(("write: one thread, page cache, fsync", 1, best_s(write_plainly, 2)))
    into = memoryview(mmap.mmap(-1, view.nbytes))

    def read_plainly() -> None:
        with file.open("rb", buffering=0) as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            at = 0
            while at < into.nbytes:
                at += source.readinto(into[at : at + BLOCK_BYTES]) or 0

    rows.append(("read: one thread", 1, best_s(read_plainly, 2)))
    file.unlink()
    store, numbers = LocalStore(folder), iter(range(100))
    rows.append(("write: LocalStore", 4, best_s(lambda: store.write(f"object-{next(numbers)}", [view]), 2)))

    def read() -> None:
        descriptor = os.open(folder / "object-0", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        store.read_into("object-0", 0, into)

    rows.append(("read: LocalStore", 4, best_s(read, 2)))
    return rows


def main() -> None:
    """Measure everything and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes to go over")
    parser.add_argument("--folder", type=Path, help="disk to measure; default: the system's temporary folder")
    options = parser.parse_args()
    memory = mmap.mmap(-1, int(options.gib * 2**30) // BLOCK_BYTES * BLOCK_BYTES)
    view = memoryview(memory)
    piece = os.urandom(2**20)
    for start in range(0, view.nbytes, 2**20):
        view[start : start + 2**20] = piece
    with options.out.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        gib = view.nbytes / 2**30
        for name, function in algorithms().items():
            share = loop_share(function, view[:BLOCK_BYTES])
            for threads in THREADS:
                part = view if threads > 1 else view[: view.nbytes // 4]
                seconds = best_s(lambda: over_blocks(function, part, threads))  # noqa: B023 - called at once
                speed = part.nbytes / 2**30 / seconds
                writer.writerow([name, threads, f"{speed:.2f}", f"{share:.2f}" if threads == 1 else ""])
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for what, threads, seconds in disk_rows(Path(folder), view):
                writer.writerow([what, threads, f"{gib / seconds:.2f}", ""])


if __name__ == "__main__":
    main()
