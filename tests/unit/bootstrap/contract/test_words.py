"""Counts in messages."""

from __future__ import annotations

import pytest

from bootstrap.contract.words import counted


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (1908, ("step",), "1,908 steps"),
        (1, ("address", "addresses"), "1 address"),
        (2, ("node is", "nodes are"), "2 nodes are"),
    ],
)
def test_a_noun_agrees_with_its_count(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said
