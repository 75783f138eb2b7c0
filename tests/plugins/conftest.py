"""Lets the tests of this folder import its helper modules, and keeps the library current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "out" / "libm3_plugins.so"


def _is_current() -> bool:
    if not LIBRARY.exists():
        return False
    sources = [p for p in (ROOT / "plugins").rglob("*") if p.is_file() and p.suffix != ".md"]
    return LIBRARY.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def _compile(*arguments: str) -> None:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session", autouse=True)
def plugin_library() -> Path:
    """out/libm3_plugins.so, compiled again (portable) when a source is newer."""
    if not _is_current():
        _compile("plugins/compile.sh", "portable")
    return LIBRARY


@pytest.fixture(scope="session")
def field_round_trip(plugin_library: Path) -> Path:
    """The compiled field_round_trip.cpp."""
    folders = sorted((ROOT / "out" / "plugins").glob("*/Makefile"))
    if not folders:  # the library was copied here
        _compile("plugins/compile.sh", "portable")
        folders = sorted((ROOT / "out" / "plugins").glob("*/Makefile"))
    _compile("make", "-C", str(folders[0].parent), "m3_field_round_trip")
    return folders[0].parent / "m3_field_round_trip"
