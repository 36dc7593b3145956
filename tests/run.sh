#!/usr/bin/env bash
# Installs what is missing into $VENV (default .venv) and runs everything: lint, then all tests in two processes.
# Further arguments go to pytest: bash tests/run.sh -k publication
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
python=$VENV/bin/python

if [ ! "$VENV/.test-install" -nt pyproject.toml ]; then
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$VENV"
    # torch first and by range: a build that is there already, CPU or CUDA, is then kept.
    "$python" -m pip install --quiet "torch>=2.9,<2.14"
    "$python" -m pip install --quiet --editable ".[test]"
    touch "$VENV/.test-install"
fi

# One thread for each process: two test processes and their workers share the cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive MPLBACKEND=agg
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

lint() {
    local failed=0
    "$VENV/bin/ruff" check --output-format concise . || failed=1
    "$VENV/bin/ruff" format --check . || failed=1
    "$VENV/bin/mypy" || failed=1
    "$python" tests/trace_ids.py >/dev/null || failed=1
    return "$failed"
}
lint >"$scratch/lint" 2>&1 &
lint_pid=$!

tests_ok=0
"$python" -m pytest -n 2 --dist worksteal -m "not gpu" -q "$@" 2>&1 | tee "$scratch/tests" || tests_ok=$?
lint_ok=0
wait "$lint_pid" || lint_ok=$?

echo "--- lint (ruff, mypy, traced cases) ---"
cat "$scratch/lint"
[ "$lint_ok" -eq 0 ] && echo "lint passed" || echo "lint FAILED"
# pytest's closing line once more, as the last word.
grep -E '(passed|failed|error|no tests ran).* in [0-9.]+' "$scratch/tests" | tail -n 1 || echo "pytest did not finish"
[ "$tests_ok" -eq 0 ] && [ "$lint_ok" -eq 0 ]
