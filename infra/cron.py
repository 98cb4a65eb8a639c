"""Cron expressions as Auto Scaling is sure to take them: the fields and names of crontab(5).

Some crons, and libraries like croniter, also take 7 for Sunday, a step without a range, ranges that wrap around, ?, L
and #; Auto Scaling may refuse these:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-scheduled-scaling.html
"""

from __future__ import annotations

from collections.abc import Iterator

from bootstrap.contract.words import counted

_FIELDS = {
    "minute": range(60),
    "hour": range(24),
    "day of month": range(1, 32),
    "month": range(1, 13),
    "day of week": range(7),
}
_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "day of week": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}


def cron_problems(cron: str) -> Iterator[str]:
    """What is wrong with an expression."""
    texts = cron.split()
    if len(texts) != len(_FIELDS):
        yield f"it has {counted(len(texts), 'field')}, and Auto Scaling takes 5: minute, hour, day, month, day of week"
        return
    for text, (field, values) in zip(texts, _FIELDS.items(), strict=True):
        if not all(_is_valid(part, field, values) for part in text.lower().split(",")):
            yield f"{field} is {text!r}, and takes {values[0]} to {values[-1]}, lists, ranges, steps or *"


def _is_valid(part: str, field: str, values: range) -> bool:
    """Judge one part of a field's list: *, a value or a range; a step follows * or a range."""
    span, slash, step = part.partition("/")
    if slash and not (_is_number(step) and int(step) and (span == "*" or "-" in span)):
        return False
    if span == "*":
        return True
    names = _NAMES.get(field, ())
    ends = [
        names.index(end) + values[0] if end in names else int(end) if _is_number(end) else -1 for end in span.split("-")
    ]
    return len(ends) <= 2 and ends == sorted(ends) and all(end in values for end in ends)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
