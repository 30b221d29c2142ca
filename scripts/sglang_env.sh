#!/usr/bin/env bash
# Make a virtual environment in which SGLang's own classes import and run on a machine without a GPU.
#
#     scripts/sglang_env.sh VERSION DIR        e.g. scripts/sglang_env.sh 0.5.23 .venv-sglang
#
# Installs the released SGLang wheel and only those of its dependencies that its model, quantisation and loader code
# imports: no FlashInfer, no sgl-kernel, no DeepGEMM, no GPU runtime. tests/sglang replaces what would need a GPU.
# About 90 s and 2.4 GB with a CPU build of torch, 6 GB with PyPI's CUDA build.
#
# This package itself is not installed; do that next: DIR/bin/pip install '.[test]'.
# PYTHON picks the interpreter (3.11 or newer; default python3.11, else python3); TORCH another torch requirement.
set -euo pipefail

if [[ $# -ne 2 ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
version=$1
dir=$2
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
torch=${TORCH:-torch==2.13.0} # serves both releases below, although they pin 2.14.1

case $version in
0.5.22 | 0.5.23) ;;
*)
    echo "sglang_env.sh: no recipe for SGLang $version; known: 0.5.22, 0.5.23" >&2
    exit 2
    ;;
esac

"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" install --upgrade pip
# torch first and alone, so that nothing else decides which build of it is taken.
"${pip[@]}" install "$torch" numpy
"${pip[@]}" install "$torch" torchvision==0.28.0 triton==3.8.0 transformers==5.19.0 orjson psutil pybase64 requests \
    packaging pillow starlette msgspec pyzmq tqdm IPython pydantic aiohttp dill apache-tvm-ffi==0.1.11 \
    sentencepiece==0.2.1 einops compressed-tensors==0.18.0 gguf openai==2.8.0 partial-json-parser
# Without SGLang's own list of dependencies, which is the GPU stack.
"${pip[@]}" install --no-deps "sglang==$version"
"$dir/bin/python" -c '
import importlib.metadata as m, torch
print("SGLang", m.version("sglang"), "with torch", torch.__version__)'
