#!/bin/sh
# Compiles out/libm3_plugins.so.
#
#   plugins/compile.sh full       SASS for sm_90a and sm_100a, PTX for every other GPU from sm_80 on
#   plugins/compile.sh portable   PTX only: quick to compile, the driver finishes the job at load
#
# Takes nvcc 13 from $CUDACXX, PATH or /usr/local/cuda, and cmake from PATH; what is missing comes
# from PyPI into .venv/cuda. Variables: JOBS (2), PYTHON (python3), TENSORRT_ROOT.
set -eu
configuration=${1:-full}
root=$(cd "$(dirname "$0")/.." && pwd)
toolchain=$root/.venv/cuda
PYTHON=${PYTHON:-python3}

fail() {
  echo "plugins/compile.sh: $1" >&2
  exit 1
}

make_environment() {
  [ -x "$toolchain/bin/python" ] || "$PYTHON" -m venv "$toolchain" ||
    fail "$PYTHON cannot make a virtual environment (Debian: apt-get install python3-venv)"
}

# A compiler and its companions, one release; cmake where the machine has none.
fetch() {
  make_environment
  "$toolchain/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

is_nvcc_13() {
  [ -n "$1" ] && "$1" --version 2>/dev/null | grep -q 'release 13\.'
}

find_nvcc() {
  fetched=$(echo "$toolchain"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$fetched"; do
    if is_nvcc_13 "$nvcc"; then
      echo "$nvcc"
      return
    fi
  done
}

case $configuration in
  full | portable) ;;
  *) fail "configuration '$configuration' is unknown; allowed are full and portable" ;;
esac
command -v g++ >/dev/null || fail "g++ is missing (Debian: apt-get install g++)"

nvcc=$(find_nvcc)
if [ -z "$nvcc" ]; then
  echo "No nvcc 13 on this machine: taking it from PyPI into .venv/cuda"
  fetch nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
  # The wheels call the folder lib; nvcc's profile looks into lib64.
  for cuda in "$toolchain"/lib/python3*/site-packages/nvidia/cu13; do ln -sfn lib "$cuda/lib64"; done
  nvcc=$(find_nvcc)
  [ -n "$nvcc" ] || fail "the nvcc that pip installed into $toolchain does not run"
fi

cmake=$(command -v cmake || true)
if [ -z "$cmake" ]; then
  cmake=$toolchain/bin/cmake
  [ -x "$cmake" ] || fetch cmake==3.31.10
fi

# The TensorRT headers come through pip, which Debian's own python3 lacks.
if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
  make_environment
  PYTHON=$toolchain/bin/python
fi

mkdir -p "$root/out"
exec 9>"$root/out/.plugins.lock"
flock 9 # one build at a time
start=$(date +%s)
build=$root/out/plugins/$configuration
"$cmake" -S "$root/plugins" -B "$build" -G "Unix Makefiles" -DM3_CONFIGURATION="$configuration" \
  -DM3_PYTHON="$PYTHON" -DCMAKE_CUDA_COMPILER="$nvcc"
"$cmake" --build "$build" -j "${JOBS:-2}"
cp "$build/libm3_plugins.so" "$root/out/.libm3_plugins.so"
mv "$root/out/.libm3_plugins.so" "$root/out/libm3_plugins.so"
echo "out/libm3_plugins.so ($configuration) in $(($(date +%s) - start)) s with $nvcc"
