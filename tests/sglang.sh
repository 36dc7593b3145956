#!/usr/bin/env bash
# A real SGLang on the CPU: sets up its environment in $SGLANG_ENV (default .venv-sglang, 2.4 GB), runs the contract suite
# and the process tests against it, and trains for a few steps. Needs what tests/run.sh installs into $VENV (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
SGLANG_ENV=${SGLANG_ENV:-.venv-sglang}
[ -x "$VENV/bin/hybridasync" ] || { echo "no $VENV/bin/hybridasync: run bash tests/run.sh first, or set VENV" >&2; exit 2; }

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive MPLBACKEND=agg
"$VENV/bin/hybridasync" sglang setup "$SGLANG_ENV"
HYBRIDASYNC_SGLANG_PYTHON=$(cd "$SGLANG_ENV" && pwd)/bin/python
export HYBRIDASYNC_SGLANG_PYTHON

"$VENV/bin/python" -m pytest tests/contract tests/system -m "sglang and not gpu" -q --timeout 600 "$@"

run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$VENV/bin/hybridasync" train quickstart-sglang --run-dir "$run/run" --set "engine.python=$HYBRIDASYNC_SGLANG_PYTHON" \
    --set rollout.num_rollout=4 --set rollout.rollout_batch_size=8 --set rollout.n_samples_per_prompt=8 \
    --set warm_start.steps=40 --set eval.eval_interval=2 --set eval.max_prompts=32
"$VENV/bin/python" - "$run/run/summary.json" <<'PY'
import json, sys
summary = json.load(open(sys.argv[1]))
good = summary["status"] == "completed" and summary["publications"] == 5 and summary["logprob_gap_max"] <= 1e-4
print(f"training: {summary['status']}, {summary['publications']} publications verified by checksum, "
      f"largest log-prob gap {summary['logprob_gap_max']:.1e}")
sys.exit(not good)
PY
