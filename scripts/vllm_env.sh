#!/usr/bin/env bash
# Make a virtual environment in which vLLM's own classes import and run on a machine without a GPU.
#
#     scripts/vllm_env.sh VERSION DIR        e.g. scripts/vllm_env.sh 0.33.0 .venv-vllm
#
# Installs the released vLLM wheel and only those of its dependencies that its model, quantisation, loader and
# configuration code imports: no FlashInfer, no CUTLASS DSL, no GPU runtime. tests/vllm replaces what would need a GPU.
# About 100 s and 3.2 GB with a CPU build of torch, 160 s and 6 GB with PyPI's CUDA build.
#
# This package itself is not installed; do that next: DIR/bin/pip install '.[test]'.
# PYTHON picks the interpreter (3.11 or 3.12; default python3.11, else python3); TORCH another torch requirement.
set -euo pipefail

if [[ $# -ne 2 ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
version=$1
dir=$2
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
torch=${TORCH:-torch==2.13.0} # serves every release below, although 0.33.0 pins 2.14.0

case $version in
0.30.*) transformers='transformers>=5.16.1,<5.18' humming=0.1.12 ;;
0.31.*) transformers='transformers>=5.16.1,<5.18' humming=0.1.16 ;;
0.32.*) transformers='transformers>=5.16.1,<5.20' humming=0.1.17 ;;
0.33.*) transformers='transformers>=5.16.1,<5.21' humming=0.1.19 ;;
*)
    echo "vllm_env.sh: no recipe for vLLM $version; known: 0.30 to 0.33" >&2
    exit 2
    ;;
esac

"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" install --upgrade pip
# torch first and alone, so that nothing else decides which build of it is taken.
"${pip[@]}" install "$torch" numpy
"${pip[@]}" install "$torch" "$transformers" regex cachetools psutil cloudpickle msgspec pydantic pyzmq cbor2 aiohttp \
    oss-harmony openai pillow pybase64 uvloop py-cpuinfo prometheus_client xgrammar==0.2.8 'fastapi<0.137' \
    partial-json-parser 'llguidance<1.8' einops requests loguru cuda-bindings jinja2 tabulate
"${pip[@]}" install --no-deps "vllm==$version" compressed-tensors==0.17.0 "humming-kernels==$humming"
"$dir/bin/python" -c '
import importlib.metadata as m, torch
print("vLLM", m.version("vllm"), "with torch", torch.__version__)'
