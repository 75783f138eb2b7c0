"""Engines on a GPU: logits against the reference executor, in two precisions and head counts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from m3trt.preprocess.segments import cut_segments, patch_positions, segment_offsets

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

LENGTH = 2309
"""Beyond 2048 tokens selection leaves blocks out."""

GRIDS = ((1, 4, 6), (1, 2, 2), (6, 8, 4))
"""Two images and a video of two segments, in patches."""

SINGLE = 5
"""Tokens at the end of a sequence that are decoded one by one."""


@pytest.fixture
def on_gpu(driver, gpu_runtime):
    """on_gpu(geometry, dtype, ...) -> a driver of a compiled engine, closed at the end."""
    made = []

    def make(geometry, dtype, **options):
        made.append(driver(geometry, dtype, runtime=gpu_runtime, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    torch.cuda.empty_cache()


@pytest.fixture
def close_to(within, reference_logits):
    """close_to(ours, geometry, dtype, ids, tables): float32 within its own rounding; bfloat16 at
    most twice as far from the float32 reference as the bfloat16 reference is."""

    def check(ours, geometry, dtype, ids, tables=None):
        tables = tables or {"float32": None, "bfloat16": None}
        exact = reference_logits(geometry, "float32", ids, tables["float32"])
        assert np.isfinite(ours).all()
        if dtype == "bfloat16":
            theirs = reference_logits(geometry, dtype, ids, tables[dtype])
            within("logits", ours, theirs, exact)
            return
        error = np.abs(ours - exact).max() / np.abs(exact).max()
        cosine = (ours * exact).sum() / np.linalg.norm(ours) / np.linalg.norm(exact)
        print(f"relative error {error:.2e}, cosine {cosine:.8f}")
        assert error < 1e-4
        assert cosine > 0.99999

    return check


@pytest.fixture
def image_prompt(token_ids):
    """Ids with 600 rows of a table among them, and the table in each dtype."""
    rng = np.random.default_rng(4)
    ids = token_ids(LENGTH)
    ids[np.sort(rng.permutation(LENGTH - SINGLE)[:600])] = 512 + np.arange(600)
    table = rng.standard_normal((600, 64)).astype(ml_dtypes.bfloat16)
    return ids, {"bfloat16": table, "float32": table.astype(np.float32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("geometry", ["gqa8", "gqa16"])
def test_logits(on_gpu, close_to, token_ids, geometry, dtype):
    """Chunked prefill, then captured decode steps."""
    ids = token_ids(LENGTH)
    ours = on_gpu(geometry, dtype).run(ids, chunk=2048, decode=SINGLE)
    close_to(ours, geometry, dtype, ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vision(vision, within, gpu_runtime, dtype):
    segments = cut_segments(GRIDS, max_frames=4)
    offsets = segment_offsets(segments)
    patches = np.random.default_rng(3).standard_normal((offsets[-1], 1176)).astype(np.float32)
    inputs = patches, patch_positions(segments, 2), offsets
    features = vision("gqa16", dtype, gpu_runtime)(*inputs)
    exact = vision("gqa16", "float32")(*inputs)
    if dtype == "float32":
        assert np.abs(features - exact).max() < 1e-4 * np.abs(exact).max()
    else:
        within("features", features, vision("gqa16", dtype)(*inputs), exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images(on_gpu, close_to, image_prompt, dtype):
    """Logits of a prompt with features of images in it."""
    ids, tables = image_prompt
    ours = on_gpu("gqa16", dtype, table=tables[dtype]).run(ids, chunk=2048, decode=SINGLE)
    close_to(ours, "gqa16", dtype, ids, tables)


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("geometry", ["gqa8", "gqa16"])
def test_captured_decode_gives_the_bits_of_eager(
    on_gpu, sequence, token_ids, monkeypatch, geometry, requests
):
    lengths = [300, 1, 129, 700, 128, 127, 2, 256][:requests]

    def decode(captured):
        run = on_gpu(geometry, "bfloat16")
        engine = run.executor._engine
        if not captured:
            monkeypatch.setattr(engine, "run_captured", engine.run)
        sequences = [sequence(run, token_ids(length + 4)) for length in lengths]
        for one, length in zip(sequences, lengths, strict=True):
            one.context(length)
        steps = [run.step([one.take(1) for one in sequences], decode=requests) for _ in range(4)]
        assert len(engine._graphs) == 4, "1, 2, 4 and 8 requests are captured at load"
        caches = [b.memory.clone() for name, b in engine._bound.items() if "cache" in name]
        return np.concatenate([rows for step in steps for rows in step]), caches

    logits, caches = decode(captured=True)
    eager_logits, eager_caches = decode(captured=False)
    assert logits.tobytes() == eager_logits.tobytes()
    assert np.isfinite(logits).all()
    assert all(torch.equal(a, b) for a, b in zip(caches, eager_caches, strict=True))


def test_three_runs_give_the_same_bits(on_gpu, token_ids):
    ids = token_ids(LENGTH)
    runs = [on_gpu("gqa16", "bfloat16").run(ids, chunk=1000, decode=SINGLE) for _ in range(3)]
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


def test_caches_of_the_largest_size(on_gpu, token_ids):
    """16383 pages, the last below 2**31 elements: the same bits from the last pages as from the
    first, the GPU's memory grows by the caches alone, and no step copies a cache."""
    ids = token_ids(300)
    used, logits = [], []
    for pages in (100, 16383):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        run = on_gpu("gqa16", "bfloat16", pages=pages)
        run.free.sort(reverse=pages == 100)
        logits.append(run.run(ids, decode=SINGLE))
        used.append(before - torch.cuda.mem_get_info()[0])
        caches = [b.memory for n, b in run.executor._engine._bound.items() if "cache" in n]
        size = sum(memory.numel() for memory in caches)
    assert logits[0].tobytes() == logits[1].tobytes()
    growth, expected = used[1] - used[0], size * (16383 - 100) / 16383
    print(f"16283 more pages: {growth / 1e6:.1f} MB, caches alone {expected / 1e6:.1f} MB")
    assert abs(growth - expected) < 32e6

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.run(token_ids(20), decode=2)
    events = profile.key_averages()
    assert len(events) > 10
    assert not [event.key for event in events if "DtoD" in event.key]
    longest = max(event.device_time for event in events)  # microseconds
    copy = max(memory.numel() for memory in caches) * 2 / 5e12 * 1e6
    print(f"longest kernel {longest:.0f} us, a copy of one cache takes {copy:.0f} us")
    assert longest < copy / 2


def test_larger_bindings_are_refused(on_gpu, token_ids):
    run = on_gpu("gqa16", "bfloat16")
    with pytest.raises(ValueError, match=r"kv_cache_0 would have 2147483648 elements"):
        run.executor._engine.bind_zeros("kv_cache_0", (16384, 2, 128, 4, 128), "kv_cache_0_out")


def test_a_step_without_logits(on_gpu, sequence, token_ids, monkeypatch):
    """0 logit rows and 0 decode rows: empty bindings."""
    ids = token_ids(300)
    run = on_gpu("gqa16", "float32")
    whole = run.run(ids)
    one, step = sequence(run, ids), run.executor.step

    def without_logits(inputs):
        object.__setattr__(inputs, "logit_rows", inputs.logit_rows[:0])
        logits = step(inputs)
        assert logits.shape == (0, 512)
        return np.zeros((inputs.input_ids.size, 512), np.float32)

    monkeypatch.setattr(run.executor, "step", without_logits)
    one.context(200)
    monkeypatch.setattr(run.executor, "step", step)
    assert np.abs(one.context(100) - whole[200:]).max() < 1e-4 * np.abs(whole).max()
