#!/usr/bin/env bash
# Installs what is missing into $VENV (default .venv) and runs everything: lint, all tests in two processes, then those
# of a real SGLang, whose environment is made meanwhile in $SGLANG_ENV (default .venv-sglang, 2.4 GB; SGLANG=0 leaves
# them out). Further arguments go to pytest, and only what they select runs: bash tests/run.sh -k publication
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv} SGLANG_ENV=${SGLANG_ENV:-.venv-sglang}
python=$VENV/bin/python
[ $# -eq 0 ] && everything=1 || everything=0
[ "$everything" -eq 1 ] && with_sglang=${SGLANG:-1} || with_sglang=0

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
    return "$failed"
}
lint >"$scratch/lint" 2>&1 &
lint_pid=$!
if [ "$with_sglang" -ne 0 ]; then
    "$VENV/bin/hybridasync" sglang setup "$SGLANG_ENV" >"$scratch/setup" 2>&1 &
    setup_pid=$!
fi

tests_ok=0 sglang_ok=0 trace_ok=0 lint_ok=0
reports=("$scratch/tests.xml")
"$python" -m pytest -n 2 --dist worksteal -m "not gpu and not sglang" -q --junitxml "$scratch/tests.xml" "$@" 2>&1 |
    tee "$scratch/tests" || tests_ok=$?
if [ "$with_sglang" -ne 0 ]; then
    wait "$setup_pid" || { sglang_ok=1 && cat "$scratch/setup"; }
    if [ "$sglang_ok" -eq 0 ]; then
        bash tests/sglang.sh --junitxml "$scratch/sglang.xml" 2>&1 | tee "$scratch/sglang" || sglang_ok=$?
        reports+=("$scratch/sglang.xml")
    fi
fi
wait "$lint_pid" || lint_ok=$?
if [ "$everything" -eq 1 ] && [ "$tests_ok" -eq 0 ]; then
    "$python" tests/trace_ids.py --ran "${reports[@]}" >"$scratch/trace" 2>&1 || trace_ok=$?
    tail -n 1 "$scratch/trace"
fi

echo "--- lint (ruff, mypy) ---"
cat "$scratch/lint"
[ "$lint_ok" -eq 0 ] && echo "lint passed" || echo "lint FAILED"
[ "$trace_ok" -eq 0 ] || echo "a promise of docs/requirements.md has no test that passed"
[ "$sglang_ok" -eq 0 ] || echo "the tests of a real SGLang FAILED"
# pytest's closing lines once more, as the last word.
for log in sglang tests; do
    [ ! -f "$scratch/$log" ] || grep -E '(passed|failed|error|no tests ran).* in [0-9.]+' "$scratch/$log" | tail -n 1
done || echo "pytest did not finish"
[ "$tests_ok" -eq 0 ] && [ "$lint_ok" -eq 0 ] && [ "$sglang_ok" -eq 0 ] && [ "$trace_ok" -eq 0 ]
