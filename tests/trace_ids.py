"""Prints which test names which promise of docs/requirements.md; fails where a promise has no test.

python tests/trace_ids.py                        # what the tests' names and docstrings say
python tests/trace_ids.py --ran unit.xml …       # only tests that ran and passed count (pytest --junitxml)
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
PROMISES = TESTS.parent / "docs" / "requirements.md"
ROW = re.compile(r"^\| ([RUC]\d{1,3})( †)? \| (.+) \|$", re.MULTILINE)
IN_TEXT = re.compile(r"\b([RUC]\d{1,3})[a-z]?\b")
RANGE = re.compile(r"\b([RUC])(\d{1,3})[–-][RUC]?(\d{1,3})\b")
IN_NAME = re.compile(r"(?<![a-z0-9])([ruc]\d{1,3})[a-z]?(?![a-z0-9])")


def ids_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Ids in the name (test_c42_…) and in the docstring, R1–R8 among them. C7 and C07 are one id."""
    text = ast.get_docstring(test) or ""
    named = {match.upper() for match in IN_NAME.findall(test.name)}
    spans = {f"{kind}{number}" for kind, low, high in RANGE.findall(text) for number in range(int(low), int(high) + 1)}
    return {normal(found) for found in named | spans | set(IN_TEXT.findall(text))}


def normal(found: str) -> str:
    return f"{found[0]}{int(found[1:]):02d}"


def collect() -> dict[str, list[str]]:
    """Id → tests that name it, as `unit/test_x.py::test_y`."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for found in ids_of(node):
                    tests[found].append(f"{path.relative_to(TESTS)}::{node.name}")
    return dict(tests)


def promises() -> dict[str, tuple[str, bool]]:
    """Id → what is promised, and whether a test has to prove it."""
    found = ROW.findall(PROMISES.read_text(encoding="utf-8"))
    return {normal(number): (text, not read_only) for number, read_only, text in found}


def passed(reports: Iterable[Path]) -> set[str]:
    """Tests that passed, with one set of parameters at least, as `unit/test_x.py::test_y`."""
    found = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if all(child.tag not in {"failure", "error", "skipped"} for child in case):
                parts = case.get("classname", "").removeprefix("tests.").split(".")
                module = parts[: next(i for i, part in enumerate(parts) if part.startswith("test_")) + 1]
                found.add(f"{'/'.join(module)}.py::{case.get('name', '').split('[')[0]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ran", type=Path, nargs="+", default=[], metavar="JUNIT_XML", help="results of test runs")
    reports: list[Path] = parser.parse_args().ran
    if absent := [str(report) for report in reports if not report.is_file()]:
        print(f"{', '.join(absent)}: no such file; run the tests first (tox -e unit,system)", file=sys.stderr)
        return 2
    ran = passed(reports)
    tests, missing = collect(), []
    for number, (text, provable) in promises().items():
        proofs = [test for test in tests.get(number, []) if not reports or test in ran]
        print(f"{number}: {text}\n    {', '.join(proofs) or ('—' if provable else 'a matter of documents')}")
        if provable and not proofs:
            missing.append(number)
    if missing:
        how = "that ran and passed " if reports else ""
        print(f"no test {how}names {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
