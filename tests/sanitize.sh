#!/bin/sh
# Runs small cases of every op under compute-sanitizer on this machine's GPU: memory accesses first,
# then races in shared memory. Only our kernels are checked.
#
#   tests/sanitize.sh [PYTHON]
set -eu
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$sanitizer" ] || {
  echo "tests/sanitize.sh: compute-sanitizer is missing: it comes with the CUDA toolkit" >&2
  exit 1
}
cases='decode-heads4-bf16 or mixed-heads1-bf16 or
  decode-sparse-bf16 or context-sparse-e4m3-both or
  odd-gelu-bf16 or
  decode-gqa16-bf16 or decode-gqa8-bf16-e4m3 or
  decode-bf16 or context-bf16 or
  (varlen and borders and bf16)'
for tool in memcheck racecheck; do
  echo "== $tool"
  "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-regex kns=m3 --print-limit 20 \
    "$python" -m pytest "$root/tests/plugins" -m gpu -q --timeout 600 -p no:cacheprovider \
    -k "$(echo $cases)"
done
