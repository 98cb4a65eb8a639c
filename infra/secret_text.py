"""What looks like a secret in a text that whoever may describe an instance can read."""

from __future__ import annotations

import math
import re
from collections import Counter

_CALLED = r"(?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token)[\w-]*"
# A value that is another variable, an ARN or a path says where the secret is, and is none.
_VALUE = r"['\"]?(?!\$|arn:|s3:|/|<|-)[^\s'\"$]{6,}"
_SECRETS = re.compile(
    # Beginnings of well-known ones ...
    r"(?<![A-Za-z0-9_])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{30,}"
    r"|nvapi-[\w-]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    # ... and values of what is called one: NAME_PASSWORD=value, "apiKey": value, --auth-token value.
    rf"|(?i:(?<![a-z:]){_CALLED}['\"]?\s*[=:]\s*{_VALUE}|--{_CALLED}\s+{_VALUE})"
    # A token of this length is none of a model's, like eos_token=</s> ...
    r"|(?i:token['\"]?\s*[=:]\s*['\"]?(?!\$|arn:|s3:|/|<|-)[\w.-]{20,})"
    # ... and who has a password in an address, as package indexes ask for it.
    r"|https?://[^\s/:@$]+:[^\s/@$]+@"
)
# Random letters and digits of this length have 4.2 bits a letter, give or take 0.1; hexadecimal digests have one case
# only, and words and names fewer bits.
_RUN = re.compile(r"[A-Za-z0-9]{24,}")
_RANDOM_BITS = 3.9


def secrets_in(text: str) -> list[str]:
    """What looks like a secret in ``text``, only its first characters, as the finding itself is printed."""
    found = [match.group() for match in _SECRETS.finditer(text)]
    found += [run for run in _RUN.findall(text) if _looks_random(run) and not any(run in each for each in found)]
    return [f"{secret[:8]}..." for secret in found]


def _looks_random(run: str) -> bool:
    kinds = sum(any(test(letter) for letter in run) for test in (str.isupper, str.islower, str.isdigit))
    bits = -sum(count / len(run) * math.log2(count / len(run)) for count in Counter(run).values())
    return kinds == 3 and bits > _RANDOM_BITS
