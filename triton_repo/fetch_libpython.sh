#!/bin/sh
# Triton's Python stub needs libpython3.X.so.1.0 of the models' interpreter. Debian has it in a
# package of its own that python3.X does not need. This puts a copy into .venv/server/libpython
# unless the interpreter or the system has one. It needs no root.
set -eu
cd "$(dirname "$0")/.."
target=.venv/server/libpython

PATH="$PATH:/sbin:/usr/sbin"
version=$(.venv/models/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
directories=$(.venv/models/bin/python -c 'import sysconfig
print(sysconfig.get_config_var("LIBDIR"), "/usr/lib/" + (sysconfig.get_config_var("MULTIARCH") or ""))')
library="libpython$version.so.1.0"
for directory in $target $directories; do
  if [ -e "$directory/$library" ]; then exit 0; fi
done
if ldconfig -p 2>/dev/null | grep -q "$library"; then exit 0; fi

if ! command -v apt-get >/dev/null; then
  echo "error: $library is missing and this is no Debian: install the package that holds it" >&2
  exit 1
fi
work=$(pwd)/$target.new
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# The exact version of the interpreter first; the newest where the archive has moved on.
installed=$(dpkg-query -W -f '${Version}' "python$version-minimal" 2>/dev/null || true)
download() {
  (cd "$work" && apt-get -qq "$@" download "libpython$version=$installed" 2>/dev/null) ||
    (cd "$work" && apt-get -qq "$@" download "libpython$version")
}
if ! download 2>/dev/null; then
  private="-o Dir::State::Lists=$work/lists -o Dir::Cache=$work/cache"
  # shellcheck disable=SC2086  # one word an option
  apt-get -qq $private update
  # shellcheck disable=SC2086
  download $private
fi
dpkg-deb -x "$work"/libpython*.deb "$work/root"
mkdir "$work/lib"
cp -L "$work"/root/usr/lib/*/"$library" "$work/lib/"
rm -rf "$target"
mv "$work/lib" "$target"
rm -rf "$work"
