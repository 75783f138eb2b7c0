"""What plugins ask for at build time, for the largest shapes, is enough for every smaller step."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from op_fields import OPS, spelled

pytestmark = pytest.mark.smoke

Sizes = dict[str, int]
TOKENS = (0, 1, 9, 129, 4097, 20_000)
REQUESTS = (0, 1, 200, 4096, 5000)
PAGES = (0, 1, 300, 9000)


def packed(size: Sizes) -> list[str]:
    requests, pages = size["requests"], size["pages"]
    return [f"i32:{requests + 1}", f"i32:{requests}", f"i32:{requests}x{pages}"]


def decode_rows(size: Sizes) -> str:
    return f"i32:{size['decode']}x{size['q_len']}"


def block_select(size: Sizes, cache: str, heads: int) -> list[str]:
    inputs = [f"bf16:{size['tokens']}x{heads}x128", f"{cache}:100x128x128"]
    inputs += [*packed(size), decode_rows(size)]
    return inputs + ["f32:1"] * (cache == "e4m3")


def sparse_attention(size: Sizes, cache: str, heads: int) -> list[str]:
    tokens = size["tokens"]
    inputs = [f"bf16:{tokens}x{heads}x128", f"{cache}:100x2x128x2x128", f"i32:2x{tokens}x16"]
    inputs += [*packed(size), decode_rows(size)]
    return inputs + ["f32:1"] * (cache == "e4m3")


def paged_attention(size: Sizes, cache: str, heads: int) -> list[str]:
    inputs = [f"bf16:{size['tokens']}x{heads}x128", f"{cache}:100x2x128x2x128"]
    inputs += [*packed(size), decode_rows(size)]
    return inputs + ["f32:1"] * (cache == "e4m3")


@pytest.fixture
def ask(plugin_library: Path, field_round_trip: Path) -> Callable[[str, list[str]], int]:
    def bytes_for(op: str, inputs: list[str]) -> int:
        command = [str(field_round_trip), str(plugin_library), op, *spelled(OPS[op])]
        done = subprocess.run([*command, "--inputs", *inputs], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{inputs}"
        return int(done.stdout)

    return bytes_for


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("op", "inputs", "heads"),
    [
        pytest.param("M3BlockSelect", block_select, 4, id="block-select"),
        pytest.param("M3BlockSelect", block_select, 3, id="block-select-plain"),
        pytest.param("M3SparseAttention", sparse_attention, 32, id="sparse-gqa16"),
        pytest.param("M3SparseAttention", sparse_attention, 16, id="sparse-gqa8"),
        pytest.param("M3SparseAttention", sparse_attention, 10, id="sparse-gqa5"),
        pytest.param("M3PagedAttention", paged_attention, 32, id="paged-gqa16"),
        pytest.param("M3PagedAttention", paged_attention, 6, id="paged-gqa3"),
    ],
)
def test_attention_never_needs_more_for_less(
    ask: Callable[[str, list[str]], int],
    op: str,
    inputs: Callable[[Sizes, str, int], list[str]],
    heads: int,
    cache: str,
) -> None:
    """Along every dimension; few tokens with many decode rows included."""
    most = {"tokens": 20_000, "requests": 5000, "pages": 9000, "decode": 512, "q_len": 8}
    largest = ask(op, inputs(most, cache, heads))
    for name, values in {
        "tokens": TOKENS,
        "requests": REQUESTS,
        "pages": PAGES,
        "decode": (0, 1, 511),
        "q_len": (0, 1, 3),
    }.items():
        needed = [ask(op, inputs({**most, name: value}, cache, heads)) for value in values]
        assert needed == sorted(needed), f"{name}: {needed}"
        assert needed[-1] <= largest, name
    for tokens, requests, q_len in itertools.product((8, 300), (1, 300), (1, 8)):
        step = {**most, "tokens": tokens, "requests": requests, "decode": requests, "q_len": q_len}
        assert ask(op, inputs(step, cache, heads)) <= largest


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [128, 96, 3072])
def test_moe_never_needs_more_for_less(
    ask: Callable[[str, list[str]], int], width: int, dtype: str
) -> None:
    """Widths of the fast kernels and of the portable ones, steps of one slab and of several."""
    hidden, experts, parts = 512, 128, int(OPS["M3MoE"]["expert_parts"])
    fc = [f"{dtype}:{experts // parts}x{2 * width}x{hidden}"] * parts
    proj = [f"{dtype}:{experts // parts}x{hidden}x{width}"] * parts
    rest = ["i32:9", f"f32:{experts}x{hidden}", f"f32:{experts}", *fc, *proj]
    rest += [f"{dtype}:{2 * width}x{hidden}", f"{dtype}:{hidden}x{width}"]
    steps = (0, 1, 8, 9, 63, 64, 65, 160, 161, 681, 4096, 4097, 8191, 8192, 8193, 30_000)
    needed = [ask("M3MoE", [f"{dtype}:{tokens}x{hidden}", *rest]) for tokens in steps]
    assert needed == sorted(needed), needed
