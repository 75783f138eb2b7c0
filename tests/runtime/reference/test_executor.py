"""The executors on small engines with random weights. Values are compared in tests/parity."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from m3trt.build import tensors
from m3trt.runtime.bindings import cache_names, step_arrays
from m3trt.runtime.reference.collectives import Communicator
from m3trt.runtime.reference.executor import ReferenceExecutor, ReferenceVisionExecutor
from m3trt.runtime.reference.moe import M3MoE
from m3trt.runtime.reference.program import Program
from m3trt.runtime.weights import WeightFileError
from safetensors.numpy import load_file, save_file

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(60)]

PAGES = 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"}])
def test_every_value_has_the_dtype_and_shape_that_the_graph_declares(
    make_engine, step_inputs, monkeypatch, dtype, options
):
    engine = make_engine(dtype, **options)
    executor = ReferenceExecutor(engine, PAGES)
    evaluator = executor._programs[0]._evaluator
    evaluator.check_shape_annotations_ = True
    logits = executor.step(step_inputs(engine.config))
    assert logits.shape == (6, engine.config.vocab_size)
    assert np.isfinite(logits).all()


def test_caches_are_updated_in_place(make_engine, step_inputs):
    engine = make_engine()
    executor = ReferenceExecutor(engine, PAGES)
    program = executor._programs[0]
    for name in cache_names(engine.config):
        before = program._bound[name]
        after = program.run(tensors.updated(name), step_arrays(step_inputs(engine.config)))
        assert after is before


def test_all_ranks_run(make_engine, step_inputs):
    engine = make_engine(tp_size=4)
    executor = ReferenceExecutor(engine, PAGES)
    inputs = step_inputs(engine.config)
    logits = executor.step(inputs)
    assert logits.shape == (6, engine.config.vocab_size)
    assert np.array_equal(logits, executor.step(inputs))
    executor.close()


def test_a_failing_rank_releases_the_others_and_its_error_is_raised(
    make_engine, step_inputs, monkeypatch
):
    engine = make_engine(tp_size=4)
    executor = ReferenceExecutor(engine, PAGES)
    inputs = step_inputs(engine.config)
    logits = executor.step(inputs)
    poisoned = executor._programs[2]._bound["transformer.layers.1.mlp.router.weight"]
    run = M3MoE._run

    def fail_on_rank_2(self, x, cu_query_lens, router_weight, *rest, **attributes):
        if router_weight is poisoned:
            raise MemoryError("rank 2 has no memory")
        return run(self, x, cu_query_lens, router_weight, *rest, **attributes)

    monkeypatch.setattr(M3MoE, "_run", fail_on_rank_2)
    with pytest.raises(MemoryError, match="rank 2"):
        executor.step(inputs)
    monkeypatch.undo()
    assert np.array_equal(executor.step(inputs), logits)


def test_weights_that_do_not_fit_are_listed(make_engine):
    engine = make_engine()
    weights = load_file(engine.weights(0))
    weights["extra"] = weights.pop("transformer.ln_f.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.float32)
    save_file(weights, engine.weights(0))
    with pytest.raises(WeightFileError) as error:
        ReferenceExecutor(engine, PAGES)
    for part in (
        "rank0.safetensors",
        "missing transformer.ln_f.weight",
        "unexpected extra",
        "lm_head.weight is float32 [64, 24], expected bfloat16 [64, 24]",
    ):
        assert part in str(error.value)


def test_a_closed_executor_says_so(make_engine, step_inputs):
    engine = make_engine()
    executor = ReferenceExecutor(engine, PAGES)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.step(step_inputs(engine.config))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_step_may_ask_for_no_logits(make_engine, step_inputs, tp_size):
    engine = make_engine(tp_size=tp_size)
    inputs = step_inputs(engine.config)
    none = dataclasses.replace(inputs, logit_rows=np.empty(0, np.int32))
    executor = ReferenceExecutor(engine, PAGES)
    assert executor.step(none).shape == (0, engine.config.vocab_size)
    executor.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vision(make_engine, rng, dtype):
    engine = make_engine(dtype)
    executor = ReferenceVisionExecutor(engine)
    executor._program._evaluator.check_shape_annotations_ = True
    numpy_dtype = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    patches = rng.standard_normal((24, engine.config.vision.patch_width)).astype(numpy_dtype)
    positions = rng.integers(0, 4, (24, 3)).astype(np.int32)
    one = executor.encode(patches, positions, np.array([0, 8, 24], np.int32))
    assert one.shape == (6, engine.config.hidden_size)
    assert one.dtype == numpy_dtype
    alone = executor.encode(patches[8:], positions[8:], np.array([0, 16], np.int32))
    assert np.allclose(one[2:].astype(np.float32), alone.astype(np.float32), atol=1e-5)
    executor.close()


def test_padding_and_unused_pages_change_nothing(make_engine, step_inputs, step):
    engine = make_engine("float32")
    inputs = step_inputs(engine.config)
    real = int(step.cu_query_lens[-1])
    clean = dataclasses.replace(
        inputs, input_ids=inputs.input_ids[:real], position_ids=inputs.position_ids[:real]
    )
    executor, poisoned = (ReferenceExecutor(engine, PAGES) for _ in range(2))
    for name in cache_names(engine.config):
        cache = poisoned._programs[0]._bound[name]
        clean_cache = executor._programs[0]._bound[name]
        unused = np.setdiff1d(np.arange(PAGES), step.page_table)
        cache[unused] = np.nan
        for request, length in enumerate(step.sequence_length):
            if length % step.block:
                page, slot = step.slot(request, int(length) - 1)
                tail = (page, ..., slice(slot + 1, None), slice(None), slice(None))
                if name.startswith("index"):
                    tail = (page, slice(slot + 1, None))
                cache[tail] = np.nan
        assert not np.isnan(clean_cache).any()
    assert np.allclose(poisoned.step(inputs), executor.step(clean), atol=1e-5)


def test_program_needs_every_input(make_engine):
    engine = make_engine()
    program = Program(engine.onnx(0), Communicator(1))
    with pytest.raises(RuntimeError, match="Unable to find input"):
        program.run(tensors.LOGITS, {})
