"""The vision tower of the released size against transformers' own, on the GPU.

Its 32 layers, projector and merger have random weights, made on the GPU and the same in both:
values of bfloat16. transformers' model in float64 is the truth, in the engine's dtype the measure.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from m3trt.bench import random_engine
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.build.profiles import vision_dimensions
from m3trt.build.vision_network import build_vision_network
from m3trt.convert.hf_config import parse_config
from m3trt.convert.layout import vision_tensors
from m3trt.preprocess.segments import cut_segments, patch_positions, segment_offsets
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.step_context import Binding

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

MODEL = Path(__file__).resolve().parents[1] / "data" / "minimax_m3_config.json"

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

GRIDS = ((1, 48, 48), (1, 2, 40), (1, 36, 64), (8, 20, 24), (6, 12, 16))
"""Three images and two videos, in patches."""

CUT = (*GRIDS[:3], (4, 20, 24), (4, 20, 24), (4, 12, 16), (2, 12, 16))
"""As transformers' processor hands them to its tower."""

IMAGE_TOKENS = sum(t * h * w for t, h, w in GRIDS[:3]) // 4


def random_weights(config, device):
    """Float32 tensors by the names of `vision.safetensors`. Queries and keys are twice as large as
    others: attention that chose nothing would hardly differ from one segment to another."""
    generator, weights = torch.Generator(device).manual_seed(1), {}
    for name, spec in vision_tensors(config).items():
        x = torch.empty(spec.shape, device=device).normal_(generator=generator)
        if name.endswith("bias"):
            x *= 0.1
        elif len(spec.shape) == 1:
            x = 1 + 0.1 * x
        else:
            x *= spec.shape[-1] ** -0.5
        if name.endswith("qkv.weight"):
            x[: 2 * len(x) // 3] *= 2
        weights[name] = x.bfloat16().float()
    return weights


def states_of(config, weights):
    """transformers' state dicts of tower and projector."""
    tower, projector = {}, {}
    for kind in ("weight", "bias"):

        def take(into, target, source, kind=kind):
            into[f"{target}.{kind}"] = weights[f"vision.{source}.{kind}"]

        take(tower, "pre_layrnorm", "pre_layernorm")
        for layer in range(config.vision.num_hidden_layers):
            block = f"layers.{layer}"
            qkv = weights[f"vision.{block}.attention.qkv.{kind}"].chunk(3)
            for name, part in zip("qkv", qkv, strict=True):
                tower[f"{block}.self_attn.{name}_proj.{kind}"] = part
            take(tower, f"{block}.self_attn.out_proj", f"{block}.attention.dense")
            for number in (1, 2):
                take(tower, f"{block}.layer_norm{number}", f"{block}.layernorm{number}")
            take(tower, f"{block}.mlp.fc1", f"{block}.mlp.fc")
            take(tower, f"{block}.mlp.fc2", f"{block}.mlp.proj")
        for theirs, ours in (("", "projector"), ("merge_", "merger")):
            take(projector, f"{theirs}linear_1", f"{ours}.fc")
            take(projector, f"{theirs}linear_2", f"{ours}.proj")
    size = config.vision
    kernel = (size.num_channels, size.temporal_patch_size, size.patch_size, size.patch_size)
    tower["embeddings.proj.weight"] = weights["vision.patch_embedding.weight"].unflatten(1, kernel)
    return tower, projector


def their_features(theirs, states, patches, dtype):
    """Features [rows, hidden], float64, of transformers' tower in `dtype`."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as code

    with torch.device("meta"):
        tower = code.MiniMaxM3VLVisionModel(theirs.vision_config)
        projector = code.MiniMaxM3VLMultiModalProjector(theirs)
    for model, state in zip((tower, projector), states, strict=True):
        kept = {name: x.to(dtype) for name, x in state.items()}
        model.eval().load_state_dict(kept, assign=True, strict=True)
    rotary = code.MiniMaxM3VLVisionRotaryEmbedding(theirs.vision_config)
    tower.rotary_emb = rotary.to(patches.device)
    with torch.no_grad():
        grid = torch.tensor(CUT, device=patches.device)
        rows = tower(pixel_values=patches.to(dtype), grid_thw=grid).last_hidden_state
        return projector(rows.squeeze(0)).double().cpu().numpy()


@pytest.fixture(scope="module")
def config():
    return parse_config(json.loads(MODEL.read_text()), {}, tp_size=1)


@pytest.fixture(scope="module")
def builds(config, gpu_runtime, tmp_path_factory):
    """{dtype: future of its engine's path}: built while transformers is imported and computes."""

    def build(dtype):
        own = dataclasses.replace(config, dtype=dtype)
        rows = int(segment_offsets(GRIDS)[-1]) // 4
        limits = BuildConfig.for_model(own, max_multimodal_len=rows)
        graph, dimensions = build_vision_network(own), vision_dimensions(own, limits)
        path = tmp_path_factory.mktemp(dtype) / "vision.engine"
        random_engine.compile_graph(graph, dimensions, gpu_runtime, path)
        return path

    with ThreadPoolExecutor(1) as pool:
        yield {dtype: pool.submit(build, dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def theirs(importable_torchvision):
    """transformers' config. The tower of 5.17 turned by two axes and had no segments."""
    pytest.importorskip("transformers", minversion="5.23.0")
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig

    made = MiniMaxM3VLConfig(**json.loads(MODEL.read_text()))
    made.vision_config._attn_implementation = "eager"
    return made


@pytest.fixture(scope="module")
def weights(config):
    yield random_weights(config, "cuda")
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def patches():
    """Random rows of all pictures, values of bfloat16."""
    rows, generator = int(segment_offsets(CUT)[-1]), torch.Generator("cuda").manual_seed(2)
    return torch.randn((rows, 1176), generator=generator, device="cuda").bfloat16().float()


@pytest.fixture(scope="module")
def exact(config, theirs, weights, patches, in_double):
    with in_double():
        return their_features(theirs, states_of(config, weights), patches, torch.float64)


@pytest.fixture(scope="module")
def encode(builds, weights, patches, gpu_runtime):
    """encode(dtype, segments) -> features of the patches by an engine."""
    made = {}

    def load(dtype):
        wait(builds.values())
        path = builds[dtype].result()
        engine = DeviceEngine(path, gpu_runtime, PLUGIN_LIBRARY)
        for name, (kind, shape) in engine.inputs.items():
            if tensors.is_weight(name):
                kept = torch.float32 if kind.itemsize == 4 else torch.bfloat16
                engine.bind(name, Binding(shape, weights[name].to(kept)))
        torch.cuda.synchronize()
        return engine

    def run(dtype, segments):
        if dtype not in made:
            made[dtype] = load(dtype)
        feeds = {
            tensors.PATCHES: patches.cpu().numpy().astype(DTYPES[dtype]),
            tensors.POSITIONS: patch_positions(segments, 2),
            tensors.CU_SEQLENS: segment_offsets(segments),
        }
        return made[dtype].run(feeds, tensors.FEATURES)

    yield run
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features(
    builds, config, theirs, weights, patches, exact, encode, within, monkeypatch, dtype
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # their patch embedding
    states = states_of(config, weights)
    measure = their_features(theirs, states, patches, getattr(torch, dtype))
    features = encode(dtype, cut_segments(GRIDS, max_frames=4))
    within("features", features, measure, exact)
    if dtype == "float32":
        ours = features.astype(np.float64)
        cosine = (ours * exact).sum() / np.linalg.norm(ours) / np.linalg.norm(exact)
        assert cosine > 0.99999
    again = encode(dtype, cut_segments(GRIDS, max_frames=4))
    assert features.tobytes() == again.tobytes()


def test_cutting_changes_videos_alone(encode):
    cut, whole = (encode("bfloat16", segments) for segments in (CUT, GRIDS))
    assert cut[:IMAGE_TOKENS].tobytes() == whole[:IMAGE_TOKENS].tobytes()
    video, other = (x[IMAGE_TOKENS:].astype(np.float64) for x in (cut, whole))
    assert np.linalg.norm(video - other) > 0.1 * np.linalg.norm(video)
