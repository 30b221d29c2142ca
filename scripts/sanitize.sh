#!/usr/bin/env bash
# Runs the tests of the ops on a C core built with AddressSanitizer and UBSan, and fails on any report.
#
#     scripts/sanitize.sh [DIRECTORY]     DIRECTORY receives the build (default: a temporary one, removed afterwards)
#
# Needs gcc with its sanitizer libraries and a Python that has torch and this package's test requirements. CPU kernels
# only: the CUDA host code needs a device to run at all. The sources are copied, because a build leaves its module beside
# them and an instrumented one would be in the way of every other run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=${1:-}
if [[ -z $work ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work"
work=$(cd "$work" && pwd)
cp -r csrc vllm_megaattn tests setup.py pyproject.toml README.md LICENSE "$work/"
rm -f "$work"/vllm_megaattn/*.so
cd "$work"

echo "building in $work"
VLLM_MEGAATTN_CUDA=0 VLLM_MEGAATTN_SANITIZE=1 python setup.py -q build_ext --inplace
nm -D --undefined-only vllm_megaattn/_C.abi3.so | grep -q __asan_report || {
    echo "the module is not instrumented" >&2
    exit 1
}

# Python itself is not instrumented, so the runtimes must be in the process before it starts. libstdc++ belongs to them:
# AddressSanitizer intercepts __cxa_throw and must find the real one, which torch would load only later.
preload=""
for library in libasan.so libubsan.so libstdc++.so; do
    preload+="${preload:+:}$(realpath "$(gcc -print-file-name=$library)")"
done

# detect_leaks=0: Python and torch keep much until exit, by design; test_process.py checks the core's own balance.
# log_path puts reports into files, where pytest's capture cannot hide them; halting makes the run fail at the first.
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:strict_string_checks=1:log_path=$work/report"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:log_path=$work/report"
export PYTHONPATH="$work" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2

# The tests that reach the C code with unusual sizes, strides and arguments. Left out: those of fresh interpreters and of
# memory in use (the sanitizer keeps freed memory on purpose), of the binary's symbols, and of torch.compile.
status=0
LD_PRELOAD=$preload python -m pytest -q -p no:cacheprovider -r f \
    tests/test_quantize.py tests/test_einsum.py tests/test_gemm.py tests/test_inv_rope.py tests/test_o_proj.py \
    tests/test_prepare_weight.py tests/test_errors.py \
    "tests/test_process.py::test_handles_are_balanced" \
    "tests/test_process.py::test_concurrent_calls_from_python_threads" \
    "tests/test_process.py::test_error_text_stays_within_its_buffer" || status=$?

shopt -s nullglob
reports=("$work"/report*)
if ((${#reports[@]})); then
    cat "${reports[@]}" >&2
    echo "sanitizer reports: ${#reports[@]}" >&2
    exit 1
fi
((status == 0)) || echo "tests failed without a sanitizer report" >&2
exit "$status"
