#!/usr/bin/env bash
# hybridasync beside TRL and Ray: bash run.sh OUT.json [options of compare.py]
# HYBRIDASYNC_PEERS: where the peers' environments are (2 GB, made on the first call); default .venv-peers here.
# PYTHON: the interpreter that has hybridasync; default python3.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?OUT.json: where the figures go}
shift
environments=${HYBRIDASYNC_PEERS:-$here/.venv-peers}
bash "$here/environments.sh" "$environments" "${PYTHON:-python3}"
OMP_NUM_THREADS=1 "${PYTHON:-python3}" "$here/compare.py" "$environments" "$out" "$@"
