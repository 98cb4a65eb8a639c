"""Checksums of checkpoint bytes; each names its algorithm, so that old checkpoints outlive a change of it.

A CRC finds every flipped bit, and every burst of damage up to its width, with certainty. CRC-64/NVME by the AWS Common
Runtime is the fastest that releases Python's lock (tests/benchmarks/results/checksums_202611.md); where the runtime is
not installed (AWS's PyTorch containers), zlib's CRC-32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from bootstrap.training.errors import ConfigurationError

# Functions by name, each with the number of its hexadecimal digits; the last is the fastest.
FUNCTIONS: dict[str, tuple[Callable[[memoryview], int], int]] = {"crc32": (zlib.crc32, 8)}
try:
    from awscrt.checksums import crc64nvme
except ImportError:
    pass
else:
    FUNCTIONS["crc64nvme"] = (crc64nvme, 16)
ALGORITHM = list(FUNCTIONS)[-1]


def checksum(view: memoryview, algorithm: str = ALGORITHM) -> str:
    """Checksum of the bytes, ``crc64nvme:`` and 16 hexadecimal digits; other threads run meanwhile."""
    if algorithm not in FUNCTIONS:
        raise ConfigurationError(
            f"checksum algorithm {algorithm!r} is not known here: install awscrt, or resume with a newer gpufleet"
        )
    function, digits = FUNCTIONS[algorithm]
    return f"{algorithm}:{function(view.cast('B')):0{digits}x}"


def matches(view: memoryview, expected: str) -> bool:
    """True where the bytes have the checksum ``expected``, of any known algorithm."""
    return checksum(view, expected.partition(":")[0]) == expected
