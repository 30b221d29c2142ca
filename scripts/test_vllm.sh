#!/usr/bin/env bash
# Run tests/vllm in an environment made by scripts/vllm_env.sh, once for each GPU generation that it simulates.
#
#     scripts/test_vllm.sh DIR [pytest arguments]
#
# vLLM reads the GPU's compute capability once per process, hence one pytest run for each of CAPABILITIES (default
# "9.0 10.0 12.0"). MEGAATTN_COMPAT_DIR=FOLDER keeps what the runs found out for scripts/compatibility_table.py.
# The package is taken from this checkout; a first run installs it and its test dependencies into DIR as a user would.
set -euo pipefail

if [[ $# -lt 1 || ! -x $1/bin/python ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python=$(realpath "$1/bin")/python
shift
cd "$(dirname "$0")/.."

"$python" -c 'import pytest, hypothesis, safetensors, vllm_megaattn' 2>/dev/null ||
    "$python" -m pip install -q --disable-pip-version-check '.[test]'

status=0
for capability in ${CAPABILITIES:-9.0 10.0 12.0}; do
    echo "== $("$python" -c 'import importlib.metadata as m; print("vLLM", m.version("vllm"))'), capability $capability"
    MEGAATTN_TEST_CAPABILITY=$capability "$python" -m pytest tests/vllm -q -p no:cacheprovider -m "vllm or not vllm" "$@" || status=$?
done
exit "$status"
