"""Check that a public class name exists once in the product: ``python -m tools.class_names``."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

PRODUCT = ("optimizer", "infra", "bootstrap")


def find_repeated(root: Path) -> dict[str, list[Path]]:
    """Return the files of each public class name that more than one class has."""
    files = defaultdict(list)
    for path in sorted(path for part in PRODUCT for path in (root / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.relative_to(root))
    return {name: paths for name, paths in files.items() if len(paths) > 1}


if __name__ == "__main__":
    repeated = find_repeated(Path(__file__).parent.parent)
    for name, paths in repeated.items():
        sys.stderr.write(f"class {name} exists in {', '.join(map(str, paths))}: one name, one meaning\n")
    sys.exit(bool(repeated))
