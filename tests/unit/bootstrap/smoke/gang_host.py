"""Ranks of the gang test, each on its own host: ``gang_host.py FOLDER NAMESPACE,... SCENARIO...``.

A scenario begins with a file ``SCENARIO.go`` of faults (one a line, ``RANK FAULT``), or ``SCENARIO.skip`` leaves it
out; every rank writes ``SCENARIO.RANK.json``. As in sabotaged.py, faults replace functions of the product in this
process alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from bootstrap.contract.node_plan import Band, Expected
from bootstrap.smoke import bandwidth, gang, products, watch

FIRST_PORT = 29500
# More than the links have, so that the plan's rate warns.
EXPECTED = Expected(network_gb_per_s=Band(value=2.0, warn_below=1.0))


def miscompute() -> None:
    """Be a GPU that computes one element wrongly."""
    original = products.exact_product
    products.exact_product = lambda a, b: original(a, b).index_fill(0, torch.tensor(7), 1.0)


def say_products_take(seconds: float) -> None:
    """Say that each product took so long, however busy the machine."""
    original = products.product_seconds
    products.product_seconds = lambda *a, **k: [seconds for _ in original(*a, **k)]


def after_products(what: Callable[[], object]) -> None:
    original = products.check

    def check(*arguments: Any, **options: Any) -> Any:
        results = original(*arguments, **options)
        what()
        return results

    products.check = check


def hurry() -> None:
    """Steps are short once all ranks are under way."""
    watch.STEP_S = 8.0


def hang() -> None:
    """A broadcast that never ends, as with aws-ofi-nccl 1.18.0; the process lives."""
    hurry()
    watch.ROLL_CALL_S, watch.LINGER_S = (
        8.0,
        9.0,
    )  # a busy machine starves a rank for more than three seconds
    torch.distributed.broadcast = lambda *_, **__: time.sleep(LONG_S)


def vanish() -> None:
    """Say that this host may be cut off now, and go on a moment later."""
    hurry()
    (FOLDER / "cut").touch()
    time.sleep(1)


FAULTS: dict[str, Callable[[], None]] = {
    "miscomputes": miscompute,
    "slow": lambda: say_products_take(0.04),
    "steady": lambda: say_products_take(0.01),
    "hurries": lambda: after_products(hurry),
    "hangs": lambda: after_products(hang),
    "vanishes": lambda: after_products(vanish),
}
REPLACED: list[tuple[Any, str]] = [(products, "exact_product"), (products, "product_seconds")]
# Limit of a step: the first of a machine that runs other tests too is slow.
LONG_S = 100.0

CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Move this process to a network namespace, as `ip netns exec` does (Python 3.11 has no os.setns)."""
    with Path(f"/var/run/netns/{namespace}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def run_rank(scenarios: list[str]) -> int:
    code = 0
    torch.set_num_threads(1)
    for number, scenario in enumerate(scenarios):
        skip = FOLDER / f"{scenario}.skip"
        while not (file := FOLDER / f"{scenario}.go").exists() and not skip.exists():
            time.sleep(0.02)
        if skip.exists():
            continue
        originals = [(owner, name, getattr(owner, name)) for owner, name in REPLACED]
        for line in file.read_text().splitlines():
            rank, fault = line.split()
            if rank == os.environ["RANK"]:
                FAULTS[fault]()
        os.environ["MASTER_PORT"] = str(FIRST_PORT + number)
        gang.JOIN_S = watch.STEP_S = LONG_S
        bandwidth.LARGE_MIB = 1
        bandwidth.SIZES_MIB, gang.COLLECTIVES = {"cpu": (1,)}, 0.03
        options = gang.SmokeOptions(
            device="cpu",
            name=f"host-{os.environ['RANK']}",
            expected=EXPECTED,
            time_limit_s=LONG_S,
            out=FOLDER / f"{scenario}.{os.environ['RANK']}.json",
        )
        code = gang.run(options)
        (FOLDER / f"{scenario}.{os.environ['RANK']}.code").write_text(str(code))
        for owner, name, original in originals:
            setattr(owner, name, original)
    return code


if __name__ == "__main__":
    FOLDER, namespaces = Path(sys.argv[1]), sys.argv[2].split(",")
    children = []
    for rank, namespace in enumerate(namespaces):
        # Forked, so that torch is loaded once for all.
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            enter(namespace)
            code = 2
            try:
                code = run_rank(sys.argv[3:])
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
