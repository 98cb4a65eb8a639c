"""What looks like a secret in a text that whoever may describe an instance can read."""

from __future__ import annotations

import math
import re
from collections import Counter

# Beginnings of well-known secrets, and assignments to what is called one.
_SECRETS = re.compile(
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z]{20,}|nvapi-[\w-]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}"
    # A value that is another variable, an ARN or a path says where the secret is.
    r"|(?i:(?<![a-z])(?:password|passwd|secret|api_?key|access_?key|auth_?token)\w*['\"]?\s*[=:]\s*['\"]?"
    r"(?!\$|arn:|/|<)[^\s'\"$]{6,})"
)
_TOKEN = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
# Random base64 of 32 characters has about 4.5 bits a character, hexadecimal digests at most 4, paths and words less.
_RANDOM_BITS = 4.3


def secrets_in(text: str) -> list[str]:
    """What looks like a secret in ``text``, only its first characters, as the finding itself is printed."""
    found = [match.group() for match in _SECRETS.finditer(text)]
    found += [token for token in _TOKEN.findall(text) if _looks_random(token)]
    return [f"{secret[:8]}..." for secret in found]


def _looks_random(token: str) -> bool:
    kinds = sum(any(test(letter) for letter in token) for test in (str.isupper, str.islower, str.isdigit))
    bits = -sum(count / len(token) * math.log2(count / len(token)) for count in Counter(token).values())
    return kinds == 3 and bits > _RANDOM_BITS
