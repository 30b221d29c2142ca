#!/usr/bin/env bash
# Runs the kernels under compute-sanitizer: memcheck, racecheck, initcheck and synccheck side by side, each over
# scripts/gpu_sanitize_driver.py, and prints each tool's last lines.
#
#     scripts/gpu_sanitize.sh [DIRECTORY]      DIRECTORY receives the logs (default: a temporary one, removed afterwards)
#
# PYTHON             the interpreter (default: python3); it must import torch and vllm_megaattn
# COMPUTE_SANITIZER  the tool (default: the one on PATH, or beside nvcc)
# SANITIZE_SECONDS   time limit of each tool (default: 140); the driver stops starting cases some time before it
# SANITIZE_TOOLS     which tools (default: all four)
#
# Exit status: 0 all clean, 1 a tool found something or failed, 2 it cannot run here.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
seconds=${SANITIZE_SECONDS:-140}
read -ra tools <<<"${SANITIZE_TOOLS:-memcheck racecheck initcheck synccheck}"
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
for beside in "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" "${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer/compute-sanitizer"; do
    [[ -z $sanitizer && -x $beside ]] && sanitizer=$beside
done
[[ -n $sanitizer ]] || {
    echo "compute-sanitizer not found: it comes with the CUDA toolkit, or as nvidia-cuda-sanitizer-api from PyPI" >&2
    exit 2
}

logs=${1:-}
if [[ -z $logs ]]; then
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
fi
mkdir -p "$logs"

# Every tensor an allocation of its own, so that an access past its end leaves it; torch's kernels loaded only when they
# are needed; no comparison of the device at first use, which the driver makes itself.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 VLLM_MEGAATTN_SELF_CHECK=0 CUDA_MODULE_LOADING=LAZY
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=3

# kns=mx_: only this package's kernels are instrumented. memcheck also reports failing CUDA calls, of which torch makes
# some on purpose while it looks around: those are not errors here, a failing call of ours raises in Python.
run_tool() {
    local tool=$1 extra=()
    [[ $tool == memcheck ]] && extra=(--report-api-errors no --padding 512)
    [[ $tool == racecheck ]] && extra=(--racecheck-report all)
    # Copies to the host are torch's: the driver copies results with the guard bytes around them, which nobody writes.
    [[ $tool == initcheck ]] && extra=(--check-api-memory-access no)
    timeout --kill-after=5 "$seconds" "$sanitizer" --tool "$tool" "${extra[@]}" --kernel-name kns=mx_ --print-limit 20 \
        --error-exitcode 99 --launch-timeout 60 --target-processes application-only --log-file "$logs/$tool.log" \
        "$python" scripts/gpu_sanitize_driver.py --seconds "$((seconds * 2 / 3))" >"$logs/$tool.out" 2>&1
    echo $? >"$logs/$tool.status"
}

begin=$SECONDS
for tool in "${tools[@]}"; do
    run_tool "$tool" &
done
wait

failed=0
for tool in "${tools[@]}"; do
    status=$(cat "$logs/$tool.status")
    summary=$(grep -h 'SUMMARY' "$logs/$tool.log" 2>/dev/null | tail -1)
    driver=$(tail -1 "$logs/$tool.out")
    echo "$tool: exit $status | ${summary:-no summary: $(tail -1 "$logs/$tool.log" 2>/dev/null)} | $driver"
    if ((status != 0)); then
        failed=1
        ((status == 124 || status == 137)) && echo "  stopped after $seconds s"
        grep -v SUMMARY "$logs/$tool.log" 2>/dev/null | head -30 | sed 's/^/  /'
        tail -5 "$logs/$tool.out" | sed 's/^/  /'
    elif [[ -z $summary || $driver != driver:* ]]; then
        failed=1
    fi
done
echo "sanitizer: ${#tools[@]} tools in $((SECONDS - begin)) s, $([[ $failed == 0 ]] && echo clean || echo NOT clean)"
exit "$failed"
