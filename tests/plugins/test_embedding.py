"""M3Embedding: builds everywhere; on a GPU it copies the right rows."""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, normal
from plugin_harness import Node, Port

VOCAB, IMAGES = 50, 7


def node(dtype: str, columns: int = 64) -> Node:
    inputs = (
        Port("input_ids", "int32", ("tokens",)),
        Port("words", dtype, (VOCAB, columns)),
        Port("prompt_table", dtype, ("pages", columns)),
    )
    outputs = (Port("y", dtype, ("tokens", columns)),)
    return Node("M3Embedding", inputs, outputs, (("vocab_size", VOCAB),))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_builds(dtype: str) -> None:
    assert harness.build(node(dtype)).nbytes > 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(node("bf16").but(vocab_size=None), "'vocab_size' is missing", id="missing"),
        pytest.param(node("bf16").but(vocab_size=51), "it takes [51", id="vocabulary"),
        pytest.param(node("bf16").retyped(words="f32"), "words=f32", id="mixed"),
        pytest.param(node("bf16", 60), "a multiple of 8", id="columns"),
        pytest.param(node("bf16", 0), "a multiple of 8", id="no-columns"),
        pytest.param(
            node("bf16").reshaped(prompt_table=("pages", 72)), "the same length", id="table"
        ),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 6144])
@pytest.mark.parametrize("count", [0, 1, 301])
def test_copies_rows(count: int, columns: int, dtype: str) -> None:
    words = normal(1, VOCAB, columns).to(DTYPES[dtype])
    table = normal(2, IMAGES, columns).to(DTYPES[dtype])
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, VOCAB + IMAGES, (count,), generator=generator)
    inputs = {"input_ids": ids.to(torch.int32), "words": words, "prompt_table": table}
    y = harness.run(node(dtype, columns), inputs)["y"]
    assert harness.same_bits(y, torch.cat([words, table])[ids])
