"""Checksums of checkpoint bytes; each names its algorithm, so that old checkpoints outlive a change of it.

A CRC finds every flipped bit, and every burst of damage up to its width, with certainty. CRC-64/NVME by the AWS Common
Runtime is the fastest that releases Python's lock (tests/benchmarks/results/checksums_202611.md); where the runtime is
not installed (AWS's PyTorch containers), zlib's CRC-32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib.util import find_spec

from bootstrap.training.errors import ConfigurationError

ALGORITHM = "crc64nvme" if find_spec("awscrt") else "crc32"


def checksum(view: memoryview, algorithm: str = ALGORITHM) -> str:
    """Checksum of the bytes, ``crc64nvme:`` and 16 hexadecimal digits; other threads run meanwhile."""
    function, digits = _function(algorithm)
    return f"{algorithm}:{function(view.cast('B')):0{digits}x}"


def matches(view: memoryview, expected: str) -> bool:
    """True where the bytes have the checksum ``expected``, of any known algorithm."""
    return checksum(view, expected.partition(":")[0]) == expected


def _function(algorithm: str) -> tuple[Callable[[memoryview], int], int]:
    if algorithm == "crc32":
        return zlib.crc32, 8
    if algorithm == "crc64nvme":
        try:
            from awscrt.checksums import crc64nvme
        except ImportError as error:
            raise ConfigurationError(
                "this checkpoint has CRC-64/NVME checksums, which need the AWS Common Runtime: pip install awscrt"
            ) from error
        return crc64nvme, 16
    raise ConfigurationError(f"checksum algorithm {algorithm!r} is not known here: resume with a newer gpufleet")
