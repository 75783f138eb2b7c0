#!/bin/sh
# Fetches NVIDIA's TensorRT 10.14 headers (Apache-2.0) into a folder, from the PyPI wheel that
# carries them, pinned by hash. For machines without TensorRT's own.
# Usage: fetch_headers.sh TARGET_DIR     ($PYTHON names the interpreter, default python3)
set -eu
target=$1
python=${PYTHON:-python3}
wheel=kernel_lens-2.0.1-py3-none-any.whl
hash=07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0
[ -e "$target/NvInferRuntime.h" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf 'kernel-lens==2.0.1 --hash=sha256:%s\n' "$hash" > "$work/requirements.txt"
"$python" -m pip download -q --no-deps --require-hashes -d "$work" -r "$work/requirements.txt"
"$python" -m zipfile -e "$work/$wheel" "$work/wheel"
mkdir -p "$(dirname "$target")"
rm -rf "$target.tmp"
cp -r "$work/wheel/kernel_lens/include/tensorrt" "$target.tmp"
rm -rf "$target"
mv "$target.tmp" "$target"
