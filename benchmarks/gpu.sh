#!/bin/sh
# What a machine with a GPU is asked, in about ten minutes: the device's suites in every mode, then five training steps
# beside CUDA's own PyTorch. It needs torch for CUDA, jax with its CUDA plugin, and pytest with its xdist and timeout.
#   sh benchmarks/gpu.sh [FOLDER for what was found; default build/gpu]
set -u
cd "$(dirname "$0")/.."
found=${1:-build/gpu}
mkdir -p "$found"
export FUSED_EAGER_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false FUSED_EAGER_PROGRESS=0
python3 -c 'from fused_eager.follower.build import build; build()' || echo "ops are followed in Python"
workers=$(($(nproc) > 2 ? $(nproc) - 2 : 1))

suite() {  # MODE FILES...
	mode=$1
	shift
	echo "suite in mode $mode: $*"
	TESTS_ON_DEVICE=1 FUSED_EAGER_VALIDATE=1 OMP_NUM_THREADS=1 FUSED_EAGER_MODE=$mode \
		python3 -m pytest -q -p no:cacheprovider --confcutdir=tests/device -m "not slow" -n "$workers" --timeout 120 \
		"$@" >"$found/suite-$mode.log" 2>&1
	tail -n 1 "$found/suite-$mode.log"
}
suite fused tests/device
suite strict tests/device/test_ops.py tests/device/test_training.py tests/device/test_tensors.py
suite debug tests/device/test_training.py
python3 -m benchmarks.gpu --json "$found/gpu.json" 2>&1 | tee "$found/gpu.log"
