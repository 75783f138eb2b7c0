#!/bin/sh
# Fetches perf_analyzer 2.51, which matches the server, into .venv/perf_analyzer.
# It comes in the wheel of tritonclient 2.51.0; two libraries that it needs come with the server's.
# Run it as: LD_LIBRARY_PATH=.venv/perf_analyzer/lib .venv/perf_analyzer/perf_analyzer ...
set -eu
cd "$(dirname "$0")/.."
target=.venv/perf_analyzer
libraries=$(echo .venv/server/lib/python3.*/site-packages/nvidia_pytriton.libs)
[ -d "$libraries" ] || { echo "error: no server in .venv/server: run make setup" >&2; exit 1; }
[ -x "$target/perf_analyzer" ] && exit 0

rm -rf "$target.new"
mkdir -p "$target.new/lib"
.venv/models/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
  --dest "$target.new" tritonclient==2.51.0
.venv/server/bin/python -m zipfile -e "$target.new"/tritonclient-2.51.0-*.whl "$target.new/wheel"
mv "$target.new/wheel/tritonclient-2.51.0.data/data/bin/perf_analyzer" "$target.new/"
chmod +x "$target.new/perf_analyzer"
rm -rf "$target.new/wheel" "$target.new"/*.whl
for library in libb64 libcudart; do
  file=$(basename "$(ls "$libraries/$library"-*)")
  # libb64-98cb6333.so.0d -> libb64.so.0d, libcudart-09529672.so.12.6.77 -> libcudart.so.12
  name=$(echo "$file" | sed -E 's/^([a-z0-9]+)-[0-9a-f]+\.so\.([0-9a-z]+).*/\1.so.\2/')
  ln -s "../../../$libraries/$file" "$target.new/lib/$name"
done
rm -rf "$target"
mv "$target.new" "$target"
