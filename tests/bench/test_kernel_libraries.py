"""The C functions through which benches and kernel tests call the kernels can be found."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine"),
]


@pytest.mark.parametrize("source", sorted(ROOT.glob("bench/*.cu")), ids=lambda path: path.stem)
def test_every_function_is_exported(source: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    flags = ["-std=c++17", "-O0", "-arch=sm_90", "-shared", "-Xcompiler=-fPIC"]
    command = [NVCC, *flags, f"-I{ROOT / 'plugins'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)  # type: ignore[arg-type]
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    written = set(re.findall(r"^\w+ (m3_bench_\w+)\(", source.read_text(), re.MULTILINE))
    assert written
    assert written <= set(symbols.split())
