"""Steps for the paged ops: packed requests, shuffled pages, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plugin_harness import Port

BLOCK, HEAD = 128, 128
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
PACKED_PORTS = (
    Port("cu_query_lens", "int32", ("requests+1",)),
    Port("sequence_length", "int32", ("requests",)),
    Port("kv_cache_block_offsets", "int32", ("requests", "max_pages")),
)
DECODE_PORT = Port("decode_rows", "int32", ("decode_requests", "q_len"))


@dataclass(frozen=True)
class Request:
    """`new` tokens in this step, `length` tokens with them."""

    new: int
    length: int


@dataclass
class Step:
    """The tensors of a step; `tokens` lists (request, position) of every real token."""

    requests: list[Request]
    inputs: dict[str, torch.Tensor]
    pages: list[list[int]]
    num_pages: int
    num_tokens: int
    tokens: list[tuple[int, int]]

    @property
    def num_real(self) -> int:
        return len(self.tokens)


def make_step(
    context: Sequence[Request],
    decode: Sequence[int] = (),
    q_len: int = 1,
    padded_rows: int = 0,
    padded_tokens: int = 0,
    spare_pages: int = 3,
    spare_columns: int = 2,
    seed: int = 0,
) -> Step:
    """Context requests, then decode requests of the given lengths, then padding.

    `padded_rows` decode rows have length 0; `padded_tokens` context tokens come with no decode.
    """
    assert not (padded_tokens and (decode or padded_rows)), "decode tokens are the last ones"
    generator = torch.Generator().manual_seed(seed)
    requests = [*context, *(Request(q_len, length) for length in decode)]
    requests += [Request(0, 0)] * padded_rows
    counts = [-(-request.length // BLOCK) for request in requests]
    num_pages = sum(counts) + spare_pages
    shuffled = torch.randperm(num_pages, generator=generator).tolist()
    pages, tokens, offsets = [], [], [0]
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        pages.append([shuffled.pop() for _ in range(count)])
        first = request.length - request.new
        tokens += [(row, first + i) for i in range(request.new)]
        offsets.append(offsets[-1] + request.new)
    columns = max([1, *counts]) + spare_columns
    table = [row + [-1] * (columns - len(row)) for row in pages]
    num_tokens = len(tokens) + padded_rows * q_len + padded_tokens
    positions = [position for _, position in tokens]
    positions += [2**31 - 1] * (num_tokens - len(tokens))
    shape = (len(decode) + padded_rows, q_len)
    inputs = {
        "position_ids": torch.tensor(positions, dtype=torch.int32),
        "cu_query_lens": torch.tensor(offsets, dtype=torch.int32),
        "sequence_length": torch.tensor([r.length for r in requests], dtype=torch.int32),
        "kv_cache_block_offsets": torch.tensor(table, dtype=torch.int32).reshape(-1, columns),
        "decode_rows": torch.full(shape, -(2**31), dtype=torch.int32),  # only its shape is read
    }
    return Step(requests, inputs, pages, num_pages, num_tokens, tokens)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def rows(step: Step, seed: int, *shape: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
    """Random activations [tokens, *shape]; NaN for padding."""
    x = normal(seed, step.num_tokens, *shape, scale=scale)
    x[step.num_real :] = torch.nan
    return x.to(DTYPES[dtype])


def random_pages(
    step: Step, dtype: str, seed: int, *shape: int, scale: float = 1.0
) -> torch.Tensor:
    """Pages [P, 128, *shape] with random values in the slots of every request, NaN elsewhere."""
    pages = torch.full((step.num_pages, BLOCK, *shape), torch.nan)
    for row, request in enumerate(step.requests):
        tokens = normal(seed + row, request.length, *shape, scale=scale)
        for page, piece in zip(step.pages[row], tokens.split(BLOCK), strict=False):
            pages[page, : len(piece)] = piece
    return pages.to(DTYPES[dtype])


def lane(step: Step, pages: torch.Tensor, request: int) -> torch.Tensor:
    """The keys of a request out of its pages, in order: [length, *shape]."""
    own = pages[torch.tensor(step.pages[request], dtype=torch.long)]
    return own.reshape(-1, *pages.shape[2:])[: step.requests[request].length]


def kv_pool(step: Step, heads: int, dtype: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    """kv_cache [pages, 2, 128, heads, 128] of random keys and values."""
    halves = [
        random_pages(step, dtype, seed + 1000 * half, heads, HEAD, scale=scale) for half in range(2)
    ]
    return torch.stack([h.view(torch.uint8) for h in halves], dim=1).view(DTYPES[dtype])


def real(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The fp64 numbers that a tensor stands for."""
    x = x.to(torch.float32).to(torch.float64)
    return x if scale is None else x * scale.to(torch.float64)


def check_close(out: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor) -> None:
    """`out` errs at most twice as much as `baseline`, the same formula in plain torch and `out`'s
    dtype, plus two units in the last place of the largest value; and points the
    same way.
    """
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} values are not finite"
    got = out.to(torch.float64).flatten()
    want = exact.flatten()
    error = (got - want).abs().max().item()
    allowed = 2 * (baseline.to(torch.float64).flatten() - want).abs().max().item()
    allowed += 2 * torch.finfo(out.dtype).eps * want.abs().max().item()
    at = int((got - want).abs().argmax())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, at flat index {at}"
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0).item()
    assert cosine >= 0.99999, f"cosine {cosine}"
