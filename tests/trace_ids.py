"""Prints which test names which requirement (R…, U…) or case (C…); fails if a required one has no test.

python tests/trace_ids.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
IN_TEXT = re.compile(r"\b([RUC]\d{1,3})[a-z]?\b")
IN_NAME = re.compile(r"(?<![a-z0-9])([ruc]\d{1,3})[a-z]?(?![a-z0-9])")


def ids_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Ids in the name (test_c42_…) and in the docstring. C7 and C07 are one id."""
    named = {match.upper() for match in IN_NAME.findall(test.name)}
    told = set(IN_TEXT.findall(ast.get_docstring(test) or ""))
    return {normal(found) for found in named | told}


def normal(found: str) -> str:
    return f"{found[0]}{int(found[1:]):02d}"


def collect() -> dict[str, list[str]]:
    """Id → tests that name it."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for found in ids_of(node):
                    tests[found].append(f"{path.relative_to(TESTS)}::{node.name}")
    return dict(tests)


def required() -> list[str]:
    lines = (TESTS / "required_ids.txt").read_text(encoding="utf-8").split("\n")
    return [normal(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def main() -> int:
    tests = collect()
    for found in sorted(tests, key=lambda found: (found[0], int(found[1:]))):
        print(f"{found}: {', '.join(tests[found])}")
    missing = [needed for needed in required() if needed not in tests]
    if missing:
        print(f"no test names {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
