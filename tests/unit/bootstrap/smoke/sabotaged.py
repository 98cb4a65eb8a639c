"""The smoke test where rank 1 computes wrongly, adds up wrongly and at last raises an error.

The faults replace functions of the product in these processes alone: the product has no switch that could be left on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch.distributed as dist

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke import products


def sabotage() -> None:
    multiply, add_up = products.exact_product, dist.all_reduce

    def wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        product[3, 5] += 1
        return product

    def wrong_sum(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = add_up(tensor, *arguments, **options)
        tensor[5] += 1
        return work

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a reason of rank 1's own")

    products.exact_product, dist.all_reduce, dist.broadcast = wrong_product, wrong_sum, fail


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        sabotage()
    sys.exit(cli.main())
