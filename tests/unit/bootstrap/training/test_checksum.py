"""Checksums: published test vectors, every flipped bit found, algorithms told apart."""

from __future__ import annotations

import os

import pytest

from bootstrap.training.checksum import ALGORITHM, checksum, matches
from bootstrap.training.errors import ConfigurationError

# CRC-32/ISO-HDLC and CRC-64/NVME: https://reveng.sourceforge.io/crc-catalogue/all.htm (check of "123456789")
VECTORS = {"crc32": "cbf43926", "crc64nvme": "ae8b14860a799888"}


@pytest.mark.parametrize("algorithm", VECTORS)
def test_published_check_value(algorithm: str) -> None:
    assert checksum(memoryview(b"123456789"), algorithm) == f"{algorithm}:{VECTORS[algorithm]}"


def test_the_fast_algorithm_is_the_default() -> None:
    assert ALGORITHM == "crc64nvme"


@pytest.mark.parametrize("algorithm", VECTORS)
def test_every_flipped_bit_is_found(algorithm: str) -> None:
    data = bytearray(os.urandom(257))
    expected = checksum(memoryview(data), algorithm)
    assert matches(memoryview(data), expected)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert not matches(memoryview(data), expected), bit
        data[bit // 8] ^= 1 << bit % 8


def test_unknown_algorithm_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="'xxh9' is not known here: install awscrt, or resume with a newer"):
        matches(memoryview(b"x"), "xxh9:00")
