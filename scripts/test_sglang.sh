#!/usr/bin/env bash
# Run tests/sglang in an environment made by scripts/sglang_env.sh, once for each GPU generation that it simulates.
#
#     scripts/test_sglang.sh DIR [pytest arguments]
#
# SGLang reads the GPU's compute capability once per process, hence one pytest run for each of CAPABILITIES (default
# "9.0 10.0 10.3 12.0"). MEGAATTN_COMPAT_DIR=FOLDER keeps what the runs found out for the compatibility table.
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
for capability in ${CAPABILITIES:-9.0 10.0 10.3 12.0}; do
    echo "== $("$python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"))'), capability $capability"
    MEGAATTN_TEST_CAPABILITY=$capability "$python" -m pytest tests/sglang -q -p no:cacheprovider -m "sglang or not sglang" "$@" || status=$?
done
exit "$status"
