"""Steps of two layers of the released widths, and the same in float32 on one rank or two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from m3trt.bench import random_engine
from m3trt.bench.slice import model
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.runtime.bindings import step_arrays
from m3trt.runtime.step import StepInputs
from m3trt.runtime.tensorrt.nccl import Communicator

MODEL = Path(__file__).resolve().parents[1] / "data" / "minimax_m3_config.json"
VOCAB = 1024

LENGTH, SINGLE = 2309, 5
"""Beyond 2048 tokens selection leaves blocks out; the last tokens are decoded one by one."""

PAGES = -(-LENGTH // 128) + 3


def sequence_step(config, ids, table):
    """One context step over the whole sequence, with the logits of every token."""
    count = ids.size
    pages = np.random.default_rng(1).permutation(-(-count // config.tokens_per_block) + 3)
    return StepInputs(
        input_ids=ids,
        position_ids=np.arange(count, dtype=np.int32),
        cu_query_lens=np.array([0, count], np.int32),
        sequence_length=np.array([count], np.int32),
        kv_cache_block_offsets=pages[None].astype(np.int32),
        decode_shape=(0, 1),
        logit_rows=np.arange(count, dtype=np.int32),
        prompt_embedding_table=table,
    )


def random_ids(count, images):
    """Ids of which `images` are rows of a table, and the table's size, at least 1."""
    rng = np.random.default_rng(count)
    ids = rng.integers(0, VOCAB, count).astype(np.int32)
    ids[np.sort(rng.permutation(count)[:images])] = VOCAB + np.arange(images)
    return ids


def full_width(tp_size):
    """In float32, with one dense and one sparse layer and a small vocabulary."""
    layers = {"sparse_layers": (False, True), "moe_layers": (False, True), "num_hidden_layers": 2}
    whole = model("slice", MODEL)
    return dataclasses.replace(whole, dtype="float32", vocab_size=VOCAB, tp_size=tp_size, **layers)


def build(library, folder, tp_size):
    folder.mkdir()
    config = full_width(tp_size)
    limits = BuildConfig.for_model(
        config, max_batch_size=1, max_num_tokens=LENGTH, max_pages=PAGES, gather_context_logits=True
    )
    random_engine.build(config, limits, library, folder, collectives=True)
    return folder / "rank0.engine"


def full_width_logits(path, library, tp_size, rank=0):
    """Logits of a sequence in one step, then of captured decode steps behind it."""
    config = full_width(tp_size)
    engine = random_engine.load(path, config, library, PAGES, rank, full_width(1))
    ids, table = random_ids(LENGTH, 0), np.zeros((1, config.hidden_size), np.float32)
    whole = sequence_step(config, ids, table)
    rows = [engine.run(step_arrays(whole), tensors.LOGITS)]
    for position in range(LENGTH, LENGTH + SINGLE):
        step = dataclasses.replace(
            whole,
            input_ids=ids[position - LENGTH :][:1],
            position_ids=np.array([position], np.int32),
            cu_query_lens=np.array([0, 1], np.int32),
            sequence_length=np.array([position + 1], np.int32),
            decode_shape=(1, 1),
            logit_rows=np.array([0], np.int32),
        )
        rows.append(engine.run_captured(step_arrays(step), tensors.LOGITS))
    engine.close()
    return np.concatenate(rows)


def run_rank(connection, rank, path, library, group):
    torch.cuda.set_device(rank)
    member = Communicator(2, rank, group, PLUGIN_LIBRARY)
    connection.send(full_width_logits(path, library, 2, rank))
    member.close()
