#!/usr/bin/env bash
# Run the GPU tests and the GPU benchmark on a machine without internet, in under ten minutes.
#
#     scripts/gpu_check.sh [FOLDER [PART…]]
#
# The wheels of `make gpu-kit` are installed into a temporary folder, in addition to the machine's
# own torch, transformers and cuda-bindings. gpu_check.json is written to FOLDER (else $OUT, else
# out/gpu-check) after each part. PART: only these parts (docs/gpu.md); the file keeps the results of
# the others. Exit status: 0 all passed, 1 a part failed or took too long, 3 no GPU. PYTHON is the
# interpreter, KIT the folder of the wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
kit=${KIT:-out/gpu-kit}
out=${1:-${OUT:-out/gpu-check}}
shift $(($# > 0))

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ ! -f "$kit/python" ]; then
    echo "$kit has no wheels: run \`make gpu-kit\` where there is internet" >&2
    exit 1
fi
if [ "$version" != "$(cat "$kit/python")" ]; then
    echo "$kit is for Python $(cat "$kit/python"), and $python is $version:" \
        "run \`make gpu-kit GPU_PYTHON=$version\`" >&2
    exit 1
fi
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
timeout 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile \
    --disable-pip-version-check --target "$packages" "$kit"/*.whl
export PYTHONPATH="$PWD:$packages" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
status=0
"$python" -m benchmarks.gpu.check "$out" "$@" || status=$?
exit "$status"
