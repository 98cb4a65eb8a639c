"""Texts that look like secrets, in user data and variables that anybody who may describe an instance can read."""

from __future__ import annotations

import math
import re
from collections import Counter

_CALLED = r"(?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token)[\w-]*"
# A value that is another variable, an ARN or a path points to a secret and is none.
_VALUE = r"['\"]?(?!\$|arn:|s3:|/|<|-)[^\s'\"$]{6,}"
_SECRETS = re.compile(
    # Prefixes of well-known tokens ...
    r"(?<![A-Za-z0-9_])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{30,}"
    r"|nvapi-[\w-]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    # ... values of names like NAME_PASSWORD=value, "apiKey": value, --auth-token value.
    rf"|(?i:(?<![a-z:]){_CALLED}['\"]?\s*[=:]\s*{_VALUE}|--{_CALLED}\s+{_VALUE})"
    # ... tokens longer than a model's (eos_token=</s>) ...
    r"|(?i:token['\"]?\s*[=:]\s*['\"]?(?!\$|arn:|s3:|/|<|-)[\w.-]{20,})"
    # ... and passwords in addresses, as package indexes ask for.
    r"|https?://[^\s/:@$]+:[^\s/@$]+@"
)
# Random letters and digits of this length have 4.2 ± 0.1 bits a letter; hexadecimal digests have one case only, and
# words and names fewer bits.
_RUN = re.compile(r"[A-Za-z0-9]{24,}")
_RANDOM_BITS = 3.9


def secrets_in(text: str) -> list[str]:
    """First characters of each text in ``text`` that looks like a secret; the rest must not be printed."""
    secrets = [match.group() for match in _SECRETS.finditer(text)]
    secrets += [run for run in _RUN.findall(text) if _looks_random(run) and not any(run in known for known in secrets)]
    return [f"{secret[:8]}..." for secret in secrets]


def _looks_random(run: str) -> bool:
    kinds = sum(any(test(letter) for letter in run) for test in (str.isupper, str.islower, str.isdigit))
    bits = -sum(count / len(run) * math.log2(count / len(run)) for count in Counter(run).values())
    return kinds == 3 and bits > _RANDOM_BITS
