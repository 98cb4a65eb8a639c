"""Program that starts processes in every way while a watcher has the signal handlers, and ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bootstrap.training.watcher import Watcher


def square(number: int) -> int:
    return number * number


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def use_pool(context: Any) -> None:
    for _ in range(4):
        with context.Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]


def use_executor(context: Any) -> None:
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(square, range(4))) == [0, 1, 4, 9]


def end_process(context: Any) -> None:
    for _ in range(4):
        process = context.Process(target=sleep_for_ever)
        process.start()
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM


def use_subprocess() -> None:
    for options in ({}, {"preexec_fn": os.setsid}):
        with subprocess.Popen(["sleep", "600"], **options) as process:  # type: ignore[call-overload]
            process.terminate()
        assert process.returncode == -signal.SIGTERM


def use_data_loader() -> None:
    from torch.utils.data import DataLoader

    for number in range(4):
        batches = iter(DataLoader([0, 1, 2, 3], num_workers=2, persistent_workers=number % 2 == 1))  # type: ignore[arg-type]
        next(batches)
        del batches


def use_own_handler() -> None:
    """A handler of the user's around the watcher's, which a forked child keeps."""
    ours: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: ours(*arguments))
    if not (pid := os.fork()):
        sleep_for_ever()
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    signal.signal(signal.SIGTERM, ours)


def main(way: str) -> None:
    watcher = Watcher(None)
    watcher.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if way in multiprocessing.get_all_start_methods():
        context: Any = multiprocessing.get_context(way)
        use_pool(context)
        use_executor(context)
        end_process(context)
        # Ended by multiprocessing when this program ends.
        context.Process(target=sleep_for_ever, daemon=True).start()
    elif way == "loader":
        use_data_loader()
    else:
        use_subprocess()
        use_own_handler()
    assert watcher.stop_notice is None and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    os.kill(os.getpid(), signal.SIGTERM)  # a notice while the daemon runs, and this program ends with the handlers
    assert watcher.stop_notice is not None


if __name__ == "__main__":
    main(sys.argv[1])
