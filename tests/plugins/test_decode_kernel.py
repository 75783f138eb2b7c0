"""The decode kernels without TensorRT: against fp64, and what they must not depend on."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import plugin_harness as harness
import pytest
import torch
from closeness import check_sums
from m3trt.bench import kernel_library as kernels
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
SCALE = HEAD**-0.5
CACHES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
FEW_ITEMS = 8
"""Decode tokens times KV heads that take a block of threads for each page on the GPU we have."""
RAGGED = (1, 2, 127, 128, 129, 1000, 1920, 2047, 2048, 2049, 2176, 5000, 9001)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return kernels.load()


@dataclass
class Case:
    """Decode rows on the device; every slot and page that no request owns holds NaN."""

    batch: Batch
    lengths: list[int]
    q: torch.Tensor
    kv: torch.Tensor
    scale: torch.Tensor | None
    ids: torch.Tensor | None

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        heads: int = 16,
        kv_heads: int = 1,
        q_len: int = 1,
        cache: str = "bf16",
        top_k: int = 0,
        padded_rows: int = 0,
        num_pages: int = 0,
        seed: int = 0,
    ) -> Case:
        lengths = [max(length, q_len) for length in lengths]
        batch = Batch.make(lengths, q_len=q_len, padded_rows=padded_rows, seed=seed)
        if num_pages:  # the same pages at the end of a larger pool
            batch.table[batch.table >= 0] += num_pages - batch.num_pages
            batch.num_pages = num_pages
        generator = torch.Generator("cuda").manual_seed(seed + 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        kv = torch.empty(
            batch.num_pages, 2, BLOCK, kv_heads, HEAD, device="cuda", dtype=CACHES[cache]
        )
        kv.view(torch.uint8).fill_(0x7F if cache == "e4m3" else 0xFF)  # NaN
        for row, length in enumerate(lengths):
            for i, page in enumerate(batch.table[row, : -(-length // BLOCK)].tolist()):
                used = min(BLOCK, length - i * BLOCK)
                kv[page, :, :used] = normal(2, used, kv_heads, HEAD).to(kv.dtype)
        q = 2 * normal(batch.num_tokens, heads, HEAD)
        q[len(lengths) * q_len :] = torch.nan
        scale = torch.tensor([0.75], device="cuda") if cache == "e4m3" else None
        case = cls(batch, lengths, q.bfloat16(), kv, scale, None)
        if top_k:
            case.ids = case.choose(kv_heads, top_k, seed)
        return case

    def choose(self, kv_heads: int, top_k: int, seed: int) -> torch.Tensor:
        """Every KV head and token for itself: ascending, the own block last, then -1."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.zeros(kv_heads, self.batch.num_tokens, top_k, dtype=torch.int32)
        for token, (_, position) in enumerate(self.places()):
            own = position // BLOCK
            for head in range(kv_heads):
                count = min(own, top_k - 1)
                row = torch.randperm(own, generator=generator)[:count].sort().values.tolist()
                row += [own] + [-1] * (top_k - 1 - count)
                ids[head, token] = torch.tensor(row)
        return ids.cuda()

    def places(self) -> list[tuple[int, int]]:
        """Request and position of every real token."""
        q_len = self.batch.q_len
        return [
            (row, position)
            for row, length in enumerate(self.lengths)
            for position in range(length - q_len, length)
        ]

    def run(self, library: ctypes.CDLL, poison: int = 0xFF) -> torch.Tensor:
        call = kernels.decode(library, self.batch, self.q, self.kv, self.ids, self.scale, poison)
        out = call()
        torch.cuda.synchronize()
        return out.view(-1, *self.q.shape[1:])

    def exact(self, dtype: torch.dtype) -> torch.Tensor:
        """The real tokens' results in the arithmetic of `dtype`."""
        heads, kv_heads = self.q.shape[1], self.kv.shape[3]
        group = heads // kv_heads
        scale = 1.0 if self.scale is None else self.scale.item()
        device, rows = harness.REFERENCE_DEVICE, []
        queries, ids = self.q.to(device), None if self.ids is None else self.ids.to(device)
        for token, (request, position) in enumerate(self.places()):
            pages = self.batch.table[request, : position // BLOCK + 1].long()
            chosen = self.kv[pages].to(device, torch.float32)
            own = (chosen * scale).transpose(0, 1).to(dtype)
            keys, values = own.reshape(2, -1, kv_heads, HEAD)[:, : position + 1].transpose(1, 2)
            for head in range(kv_heads):
                k, v = keys[head], values[head]
                if ids is not None:
                    blocks = ids[head, token]
                    kept = torch.isin(torch.arange(len(k), device=device) // BLOCK, blocks)
                    k, v = k[kept], v[kept]
                q = queries[token, head * group : (head + 1) * group].to(dtype)
                wide = torch.promote_types(dtype, torch.float32)
                weights = torch.softmax((q @ k.T).to(wide) * SCALE, dim=-1).to(dtype)
                rows.append(weights @ v)
        return torch.cat(rows).view(-1, heads, HEAD).cuda()

    def check(self, library: ctypes.CDLL) -> None:
        out = self.run(library)
        real = len(self.lengths) * self.batch.q_len
        assert (out[real:] == 0).all(), "padding rows are not zero"
        self.compare(out[:real], self.exact(torch.float64), self.exact(torch.bfloat16))

    def compare(self, out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
        check_sums(out, exact, plain, terms=max(self.lengths))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("top_k", [0, 3, 16, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 4), (16, 1), (8, 1), (12, 4), (5, 1), (2, 2)])
def test_ragged_rows(
    library: ctypes.CDLL, cache: str, top_k: int, heads: int, kv_heads: int
) -> None:
    Case.make(RAGGED, heads, kv_heads, 1, cache, top_k, padded_rows=3).check(library)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("top_k", [0, 16])
@pytest.mark.parametrize("q_len", range(2, 9))
def test_speculative_rows(library: ctypes.CDLL, cache: str, top_k: int, q_len: int) -> None:
    heads = 16 if q_len in (2, 4, 8) else 10
    Case.make(RAGGED, heads, 1, q_len, cache, top_k, padded_rows=2).check(library)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(library: ctypes.CDLL, group: int) -> None:
    for cache in CACHES:
        for top_k in (0, 16):
            Case.make([2300, 700], 2 * group, 2, 1, cache, top_k).check(library)


@pytest.mark.parametrize("cache", CACHES)
def test_every_tail(library: ctypes.CDLL, cache: str) -> None:
    lengths = [15 * BLOCK + tail for tail in range(1, BLOCK + 1)]
    for first in (0, *range(1, BLOCK, 24)):  # all at once, then few enough for a block a page
        count = BLOCK if first == 0 else FEW_ITEMS
        Case.make(lengths[first : first + count], cache=cache, top_k=16).check(library)
    Case.make(lengths, cache=cache).check(library)


@pytest.mark.parametrize("requests", [1, 2, 5, 9, 16, 34, 67, 140])
def test_every_split_of_selections(library: ctypes.CDLL, requests: int) -> None:
    """From one item to several rounds of them, at every size of cluster."""
    lengths = [3000 + 37 * i for i in range(requests)]
    Case.make(lengths, 16, 1, top_k=16, padded_rows=1).check(library)
    Case.make(lengths, 64, 4, top_k=16, cache="e4m3").check(library)


@pytest.mark.parametrize("cache", CACHES)
def test_long_contexts(library: ctypes.CDLL, cache: str) -> None:
    """Rows that many blocks share beside rows that one block finishes."""
    Case.make([70_000, 1, 5000], 16, 1, cache=cache, padded_rows=1).check(library)
    Case.make([70_001, 8], 16, 1, 3, cache).check(library)
    Case.make([70_001, 300_000, 8], 32, 2, cache=cache, top_k=16).check(library)
    if cache == "e4m3":  # a row of the table that shared memory does not hold
        Case.make([600_000], 16, 1, cache=cache, top_k=16).check(library)


@pytest.mark.parametrize("padded_rows", [0, FEW_ITEMS])
def test_skips_entries_anywhere(library: ctypes.CDLL, padded_rows: int) -> None:
    case = Case.make([2049, 130, 4000], 32, 2, top_k=16, padded_rows=padded_rows)
    assert case.ids is not None
    case.ids[:, :, 0] = -1  # before valid entries
    case.ids[1, 2, 5:9] = -1
    case.ids[0, 1] = -1  # one KV head sees nothing, the other does
    case.ids[0, 0, 1] = 17  # behind the query, and none of its request's pages
    case.ids[1, 0, 1] = 10_000
    out = case.run(library)[:3]
    assert (out[1, :16] == 0).all()
    assert (out[1, 16:] != 0).any()
    exact, plain = case.exact(torch.float64), case.exact(torch.bfloat16)
    case.compare(out, exact.nan_to_num(0.0), plain.nan_to_num(0.0))


@pytest.mark.parametrize("top_k", [0, 16])
def test_rows_without_keys(library: ctypes.CDLL, top_k: int) -> None:
    """A row whose request claims no tokens, and a step of padding alone."""
    case = Case.make([500, 700, 900], 16, 1, top_k=top_k, padded_rows=2)
    before = case.run(library)
    case.batch.sequence_length[1] = 0
    out = case.run(library)
    assert (out[1] == 0).all()
    assert (out[3:] == 0).all()
    if top_k:
        assert torch.equal(out[[0, 2]], before[[0, 2]])
    case.batch.cu_query_lens[:] = 0
    case.batch.sequence_length[:] = 0
    assert (case.run(library) == 0).all()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("top_k", "padded_rows"), [(0, 0), (16, 0), (16, 1)])
def test_large_pools(library: ctypes.CDLL, cache: str, top_k: int, padded_rows: int) -> None:
    """Pages behind 2^31 elements and 2^32 bytes."""
    case = Case.make([5000, 300], 64, 4, 1, cache, top_k, padded_rows, num_pages=40_000)
    assert case.kv[case.batch.table.max()].storage_offset() > 2**32
    case.check(library)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("top_k", [0, 16])
def test_repeats_bit_for_bit(library: ctypes.CDLL, cache: str, top_k: int) -> None:
    """Whatever the workspace holds and ran before."""
    case = Case.make(RAGGED, 64, 4, 2, cache, top_k, padded_rows=1)
    other = Case.make([40_000, 3], 64, 4, 2, cache, top_k, seed=7)
    first = case.run(library, poison=0xFF)
    other.run(library)
    assert torch.equal(first, case.run(library, poison=0x3C))


@pytest.mark.parametrize("cache", CACHES)
def test_selections_do_not_depend_on_their_neighbours(library: ctypes.CDLL, cache: str) -> None:
    """A step of as many decode tokens gives a row the same bits, in any place beside any rows.

    With another number of tokens the cluster of an item may have another size.
    """
    case = Case.make([2500, 900, 3100, 4000], 64, 4, 1, cache, 16, padded_rows=4)
    expected = case.run(library)
    order = [3, 1, 0, 2]
    batch = case.batch
    for tensor in (batch.sequence_length, batch.table, case.q):
        tensor[:4] = tensor[order].clone()
    assert case.ids is not None
    case.ids[:, :4] = case.ids[:, order].clone()
    batch.sequence_length[2] = 700  # another length for a neighbour
    out = case.run(library)
    assert torch.equal(out[[0, 1, 3]], expected[[3, 1, 2]])
