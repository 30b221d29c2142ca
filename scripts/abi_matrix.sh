#!/usr/bin/env bash
# Builds one wheel and tests that same file with the oldest and the newest Python and torch it is meant for.
#
#     scripts/abi_matrix.sh [DIRECTORY]    DIRECTORY keeps the wheel and the virtual environments (default: a temporary
#                                          one, removed afterwards)
#
# Run by hand before a release: it downloads two torch wheels with what they depend on, several gigabytes where the index
# has no CPU wheels (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu fetches small ones). Pythons are looked for
# as pythonX.Y on PATH, in pyenv's versions, and through uv. Environment variables:
#
#     OLD_PYTHON=3.10  OLD_TORCH=2.10  NEW_PYTHONS="3.14 3.13" (the first that is found)  NEW_TORCH= (newest: empty)
#     VLLM_MEGAATTN_CUDA as for any build (setup.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

old_python=${OLD_PYTHON:-3.10}
old_torch=${OLD_TORCH:-2.10}
new_pythons=${NEW_PYTHONS:-3.14 3.13}
new_torch=${NEW_TORCH:-}

work=${1:-}
if [[ -z $work ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work"
work=$(cd "$work" && pwd)

# Path of the interpreter of a version X.Y, or nothing.
find_python() {
    local version=$1 candidate
    for candidate in "$(command -v "python$version" || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python \
        "$(command -v uv >/dev/null && uv python find "$version" 2>/dev/null || true)"; do
        # pyenv's shims exist for versions that are not active and then fail, so ask the interpreter itself
        if [[ -x $candidate ]] && "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (${version/./, }))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# make_venv NAME PYTHON: a virtual environment under $work, reused if it is there.
make_venv() {
    [[ -x $work/$1/bin/python ]] || "$2" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install -q --upgrade pip
}

old=$(find_python "$old_python")
[[ -n $old ]] || { echo "Python $old_python not found on PATH, in pyenv or through uv" >&2; exit 1; }
new=""
for version in $new_pythons; do
    new=$(find_python "$version")
    [[ -z $new ]] || break
done
[[ -n $new ]] || { echo "none of Python $new_pythons found on PATH, in pyenv or through uv" >&2; exit 1; }

echo "=== wheel, built with $("$old" --version) and no torch"
make_venv old "$old"
rm -rf "$work/source" "$work/wheel"
mkdir "$work/source" # a copy: the build leaves its module beside the sources
cp -r csrc vllm_megaattn setup.py pyproject.toml README.md LICENSE "$work/source/"
rm -f "$work"/source/vllm_megaattn/*.so
"$work/old/bin/python" -m pip wheel -q --no-deps --wheel-dir "$work/wheel" "$work/source"
wheels=("$work"/wheel/*.whl)
[[ ${#wheels[@]} -eq 1 && ${wheels[0]} == *-cp310-abi3-*.whl ]] || { echo "not one abi3 wheel: ${wheels[*]}" >&2; exit 1; }

# try NAME PYTHON TORCH: installs that very file, then runs the tests from outside the source tree.
try() {
    local name=$1 python=$2 torch=$3
    make_venv "$name" "$python"
    local bin=$work/$name/bin
    "$bin/python" -m pip install -q "torch${torch:+==$torch.*}"
    "$bin/python" -m pip install -q --force-reinstall --no-deps "${wheels[0]}"
    "$bin/python" -m pip install -q "${wheels[0]}[test]"
    # The tests read files beside them (csrc/torch_symbols.h, a benchmark, an example, docs); the package itself must come
    # from the wheel, not from here.
    rm -rf "$work/run-$name"
    mkdir "$work/run-$name"
    cp -r tests csrc scripts benchmarks examples docs README.md pyproject.toml "$work/run-$name/"
    cd "$work/run-$name"
    "$bin/python" - "$root" <<'PY'
import sys
import torch, vllm_megaattn
from vllm_megaattn import _C
assert not _C.__file__.startswith(sys.argv[1]), _C.__file__
print(f"=== Python {sys.version.split()[0]}, torch {torch.__version__}, {_C.__file__}")
PY
    sha256sum "$("$bin/python" -c 'import torch; from vllm_megaattn import _C; print(_C.__file__)')" >>"$work/digests"
    "$bin/python" -m pytest -q -p no:cacheprovider -r f tests
    cd "$root"
}

rm -f "$work/digests"
try old "$old" "$old_torch"
try new "$new" "$new_torch"

[[ $(cut -d' ' -f1 "$work/digests" | sort -u | wc -l) -eq 1 ]] || { echo "the two tested files differ" >&2; exit 1; }
echo "=== the same file passed with both: $(cut -d' ' -f1 "$work/digests" | head -n 1)"
