"""The plugin library as a file and in both TensorRT libraries that a machine without GPU has."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from op_fields import LETTERS, OPS, REFUSED, Value, spelled

pytestmark = pytest.mark.smoke

EXPORTS = {"getCreators", "setLoggerFinder", "m3_set_communicator", "m3_plugins_version"}
NEEDED = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
LIBRARIES = {"tensorrt_rtx": "1.7.1", "tensorrt_lean": "11.4"}

Case = tuple[str, list[tuple[str, Value]]]


def cases() -> dict[str, Case]:
    """Every creation that the tests ask about, by a name."""
    found: dict[str, Case] = {}
    for op, fields in OPS.items():
        found[op] = (op, list(fields.items()))
        found[f"{op} with unknown"] = (op, [*fields.items(), ("no_such_field", 1)])
        for name in fields:
            kept = [(n, v) for n, v in fields.items() if n != name]
            found[f"{op} without {name}"] = (op, kept)
            found[f"{op} with two {name}"] = (op, [*fields.items(), (name, fields[name])])
    for op, name, value in REFUSED:
        changed = {**OPS[op], name: value}
        found[f"{op} with {name}={value!r}"] = (op, list(changed.items()))
    return found


@pytest.fixture(scope="module", params=LIBRARIES)
def created(request: pytest.FixtureRequest, plugin_library: Path) -> dict[str, Any]:
    """What a TensorRT library made of every case: {name: (created, log)} under "results"."""
    script = Path(__file__).with_name("create_plugins.py")
    done = subprocess.run(
        [sys.executable, str(script), request.param, str(plugin_library)],
        input=json.dumps(list(cases().values())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["version"].startswith(LIBRARIES[request.param])
    answer["results"] = dict(zip(cases(), answer["results"], strict=True))
    return answer


def test_exports_and_dependencies(plugin_library: Path) -> None:
    """Nothing but the entry points, and nothing that a machine without CUDA lacks."""
    symbols = subprocess.check_output(
        ["nm", "--dynamic", "--defined-only", str(plugin_library)], text=True
    )
    assert {line.split()[-1] for line in symbols.splitlines()} == EXPORTS
    dynamic = subprocess.check_output(["readelf", "--dynamic", str(plugin_library)], text=True)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line}
    assert needed <= NEEDED


def test_plain_c_entry_points(plugin_library: Path) -> None:
    library = ctypes.CDLL(str(plugin_library))
    library.m3_plugins_version.restype = ctypes.c_char_p
    assert library.m3_plugins_version().count(b".") == 2
    library.m3_set_communicator(2, ctypes.c_void_p(1))
    library.m3_set_communicator(2, None)


def test_registers_every_op(created: dict[str, Any]) -> None:
    assert sorted(created["creators"]) == sorted(OPS)


def test_creates_every_op(created: dict[str, Any]) -> None:
    for op in OPS:
        made, log = created["results"][op]
        assert made, log


def test_refuses_missing_unknown_and_repeated_fields(created: dict[str, Any]) -> None:
    for op, fields in OPS.items():
        made, log = created["results"][f"{op} with unknown"]
        assert not made
        assert f"{op}: unknown attribute 'no_such_field'; it takes {', '.join(fields)}" in log
        for name in fields:
            made, log = created["results"][f"{op} without {name}"]
            assert not made
            assert f"layer 'layers.3': {op}: attribute '{name}' is missing" in log
            made, log = created["results"][f"{op} with two {name}"]
            assert not made
            assert f"{op}: attribute '{name}' is given twice" in log


def test_refuses_wrong_values(created: dict[str, Any]) -> None:
    for op, name, value in REFUSED:
        made, log = created["results"][f"{op} with {name}={value!r}"]
        assert not made, f"{op} took {name}={value!r}"
        assert f"'{name}'" in log


@pytest.mark.parametrize("op", OPS)
def test_fields_survive_serialisation(
    op: str, plugin_library: Path, field_round_trip: Path
) -> None:
    done = subprocess.run(
        [str(field_round_trip), str(plugin_library), op, *spelled(OPS[op])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    written = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert list(written) == list(OPS[op])
    for name, value in OPS[op].items():
        letter, _, text = written[name].partition(":")
        assert letter == LETTERS[type(value)]
        assert (
            type(value)(text) == pytest.approx(value, rel=1e-6)
            if letter == "f"
            else text == str(value)
        )
