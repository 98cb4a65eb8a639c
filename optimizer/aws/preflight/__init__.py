"""``gpufleet preflight``: whether this AWS account can carry out a plan today, before anything is created or paid.

Every call reads; none changes anything. One file a concern, each a generator of rows; ``run`` calls them side by side.
What cannot be asked is "unknown" with the reason, never a guess and never "ok".
"""

from optimizer.aws.preflight.model import LEVELS, Account, Level, Row, Stack, StackNames, Target
from optimizer.aws.preflight.run import Report, preflight

__all__ = ["LEVELS", "Account", "Level", "Report", "Row", "Stack", "StackNames", "Target", "preflight"]
