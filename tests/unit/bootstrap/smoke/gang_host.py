"""Three ranks of the gang test, each a host of its own, one scenario after another: ``gang_host.py FOLDER``.

Every rank writes ``SCENARIO.RANK.json``. Faults replace functions of the product in these processes alone: the product
has no switch that could be left on.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch._dynamo  # DDP imports it at its first use
import torch.distributed as dist

from bootstrap.contract.node_plan import Band, Expected
from bootstrap.smoke import bandwidth, gang, gradients, pairs, products, watch
from bootstrap.smoke.ranks import Ranks

COUNT = 3
# More than the links have, so that the plan's rate warns.
EXPECTED = Expected(network_gb_per_s=Band(value=2e6, warn_below=1e6))
# Limit of a step: the first of a machine that runs other tests too is slow.
LONG_S = 100.0


def miscompute() -> None:
    """Be a GPU that computes wrongly, which spoils the gradients of all ranks."""
    original = gradients.gradients_of
    gradients.gradients_of = lambda model, inputs: original(model, 1.01 * inputs)


def add_up_wrongly_and_fail() -> None:
    """Leave one element of each all-reduce wrong, and raise an error in the broadcast."""
    original = dist.all_reduce

    def wrong_sum(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        original(tensor, *arguments, **options)
        tensor[5] += 1

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a reason of rank 1's own")

    dist.all_reduce, dist.broadcast = wrong_sum, fail


def say_products_take(seconds: float) -> None:
    """Say that each product took so long, however busy the machine."""
    module: Any = products
    original = module.seconds_each
    module.seconds_each = lambda *a, **k: [seconds for _ in original(*a, **k)]


def slow_down(links: list[set[int]]) -> None:
    """Say that exchanges over these links take ten times as long as the others, however busy the machine."""
    original = pairs._exchange

    def exchange(ranks: Ranks, peer: int, sent: torch.Tensor, received: torch.Tensor) -> float:
        original(ranks, peer, sent, received)
        return 0.1 if {ranks.rank, peer} in links else 0.01

    pairs._exchange = exchange


def after_products(what: Callable[[], object]) -> None:
    """Do something once all ranks are under way, from where on steps are short."""
    original = products.check

    def check(*arguments: Any, **options: Any) -> Any:
        results = original(*arguments, **options)
        watch.STEP_S = 8.0
        what()
        return results

    products.check = check


def hurry() -> None:
    """Have short steps once all ranks are under way."""
    after_products(int)


def hang() -> None:
    """A broadcast that never ends, as with aws-ofi-nccl 1.18.0; the process lives."""
    watch.ROLL_CALL_S, watch.LINGER_S = 8.0, 9.0  # a busy machine starves a rank for more than three seconds
    dist.broadcast = lambda *_, **__: time.sleep(LONG_S)


def vanish() -> None:
    """Stop for good, as a host that is cut off."""
    os.kill(os.getpid(), signal.SIGSTOP)


# Slow links, and the faults of each rank.
SCENARIOS: dict[str, tuple[list[set[int]], dict[int, Callable[[], object]]]] = {
    "healthy": ([], {}),
    "slow_host": ([{0, 2}, {1, 2}], {}),
    "three_faults": ([{1, 2}], {0: miscompute, 1: lambda: say_products_take(0.04)}),
    "fails": ([], {1: add_up_wrongly_and_fail}),
    "vanishes": ([], {0: hurry, 1: hurry, 2: lambda: after_products(vanish)}),
    "hangs": ([], {rank: lambda: after_products(hang) for rank in range(COUNT)}),
}


def run_rank(folder: Path, scenario: str, rank: int) -> int:
    links, faults = SCENARIOS[scenario]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    say_products_take(0.01)
    slow_down(links)
    faults.get(rank, int)()
    gang.JOIN_S = watch.STEP_S = LONG_S
    bandwidth.SIZES_MIB, gang.COLLECTIVES = {"cpu": (1,)}, 0.03
    return gang.run(
        gang.SmokeOptions(
            device="cpu",
            name=f"host-{rank}",
            expected=EXPECTED,
            time_limit_s=LONG_S,
            out=folder / f"{scenario}.{rank}.json",
        )
    )


def main(folder: Path) -> None:
    for scenario in SCENARIOS:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"WORLD_SIZE": str(COUNT), "GLOO_SOCKET_IFNAME": "lo"}
        children = []
        for rank in range(COUNT):
            # Forked, so that torch is loaded once for all.
            if (child := os.fork()) == 0:
                code = 2
                try:
                    code = run_rank(folder, scenario, rank)
                finally:
                    os._exit(code)
            children.append(child)
        for child in children[: 2 if scenario == "vanishes" else None]:
            os.waitpid(child, 0)
        if scenario == "vanishes":
            os.kill(children[2], signal.SIGKILL)
            os.waitpid(children[2], 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
