"""One dense and one sparse layer of the released widths against transformers' own, on the GPU.

Weights are random, made on the GPU, and shared: transformers' parameters are views of them or
copies in float32. Its float32 model is the truth, its bfloat16 model the measure.
"""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import pytest
from full_width_steps import MODEL, VOCAB, random_ids, sequence_step
from m3trt.bench import random_engine
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.convert.hf_config import parse_config
from m3trt.convert.layout import expert_stack
from m3trt.runtime.bindings import step_arrays

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

LONGEST = 4096


def two_layers(**sizes):
    """The released config with one dense and one sparse layer and a small vocabulary, ours and
    transformers'; `sizes` changes it by the names of `config.json`."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    data = json.loads(MODEL.read_text())
    text = data["text_config"] | {"num_hidden_layers": 2, "moe_layer_freq": [0, 1]} | sizes
    flags = {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1]}
    text["sparse_attention_config"] = text["sparse_attention_config"] | flags
    ours = parse_config(data | {"text_config": text}, {}, tp_size=1)
    theirs = MiniMaxM3VLTextConfig(**text | {"vocab_size": VOCAB})
    theirs._attn_implementation = theirs._experts_implementation = "eager"
    return dataclasses.replace(ours, vocab_size=VOCAB), theirs


def state_of(config, weights):
    """transformers' state dict of the text model from the weights of a checkpoint."""
    heads, kv, head = config.num_attention_heads, config.num_key_value_heads, config.head_size
    state = {
        "embed_tokens.weight": weights["transformer.vocab_embedding.weight"],
        "norm.weight": weights["transformer.ln_f.weight"] - 1,
    }
    for layer in range(config.num_hidden_layers):
        source, target = f"transformer.layers.{layer}", f"layers.{layer}"
        attention, mlp = f"{source}.attention", f"{source}.mlp"
        rows = [("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head)]
        norms = ["q_layernorm", "k_layernorm"]
        if config.sparse_layers[layer]:
            index = config.sparse_attention.index_head_size
            rows += [("indexer.q_proj", kv * index), ("indexer.k_proj", index)]
            norms += ["index_q_layernorm", "index_k_layernorm"]
        parts = weights[f"{attention}.qkv.weight"].split([size for _, size in rows])
        for (name, _), part in zip(rows, parts, strict=True):
            state[f"{target}.self_attn.{name}.weight"] = part
        for name in norms:
            short = name.replace("index_", "indexer.").replace("layernorm", "norm")
            state[f"{target}.self_attn.{short}.weight"] = weights[f"{attention}.{name}.weight"] - 1
        state[f"{target}.self_attn.o_proj.weight"] = weights[f"{attention}.dense.weight"]
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("post_layernorm", "post_attention_layernorm"),
        ):
            state[f"{target}.{theirs}.weight"] = weights[f"{source}.{ours}.weight"] - 1
        if not config.moe_layers[layer]:
            state[f"{target}.mlp.gate_up_proj.weight"] = weights[f"{mlp}.fc.weight"]
            state[f"{target}.mlp.down_proj.weight"] = weights[f"{mlp}.proj.weight"]
            continue
        bias = "e_score_correction_bias"
        state[f"{target}.mlp.gate.weight"] = weights[f"{mlp}.router.weight"]
        state[f"{target}.mlp.gate.{bias}"] = weights[f"{mlp}.router.{bias}"]
        for ours, theirs in (("fc", "gate_up_proj"), ("proj", "down_proj")):
            names = [
                expert_stack(f"{mlp}.{ours}", part, config.expert_parts)
                for part in range(config.expert_parts)
            ]
            stack = torch.cat([weights[name] for name in names])
            state[f"{target}.mlp.experts.{theirs}"] = stack
            shared = weights[f"{mlp}.shared_expert.{ours}.weight"]
            state[f"{target}.mlp.shared_experts.{theirs}.weight"] = shared
    return state


def logits_of(theirs, state, head, inputs, dtype):
    """Logits [tokens, vocab], float64, of transformers' text model in `dtype`."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as code

    kept = {name: x if x.dtype == torch.float32 else x.to(dtype) for name, x in state.items()}
    with torch.device("meta"):
        model = code.MiniMaxM3VLTextModel(theirs)
    model.load_state_dict(kept, assign=True, strict=True)
    model.rotary_emb = code.MiniMaxM3VLRotaryEmbedding(theirs).to(inputs.device)
    with torch.no_grad():
        hidden = model.eval()(inputs_embeds=inputs[None].to(dtype), use_cache=False)
        out = hidden.last_hidden_state[0]
        return torch.nn.functional.linear(out.float(), head.float()).double().cpu().numpy()


@pytest.fixture(scope="module")
def engine(gpu_runtime, tmp_path_factory):
    """The config and the loaded engine."""
    config, _ = two_layers()
    limits = BuildConfig.for_model(
        config,
        max_batch_size=1,
        max_num_tokens=LONGEST,
        max_seq_len=2 * LONGEST,
        max_pages=64,
        gather_context_logits=True,
    )
    folder = tmp_path_factory.mktemp("full_width")
    random_engine.build(config, limits, gpu_runtime, folder)
    engine = random_engine.load(folder / "rank0.engine", config, gpu_runtime, pages=64)
    yield config, engine
    engine.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("share", [pytest.param(0, id="text"), pytest.param(0.5, id="images")])
@pytest.mark.parametrize("count", [2309, 4096])
def test_logits(engine, importable_torchvision, within, count, share):
    """Images are random rows of a table here; what the tower makes of them has tests of its own
    (`test_full_width_vision.py`)."""
    images = int(share * count)
    config, ours = engine
    _, theirs = two_layers()
    weights = {
        name: binding.memory for name, binding in ours._bound.items() if tensors.is_weight(name)
    }
    state, head = state_of(config, weights), weights["lm_head.weight"]
    ids = random_ids(count, images)
    generator = torch.Generator("cuda").manual_seed(count)
    table = torch.randn(
        (max(images, 1), config.hidden_size), generator=generator, device="cuda"
    ).bfloat16()
    embedded = torch.cat([weights["transformer.vocab_embedding.weight"], table])[
        torch.from_numpy(ids).cuda().long()
    ]
    array = table.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    got = ours.run(step_arrays(sequence_step(config, ids, array)), tensors.LOGITS)
    measure = logits_of(theirs, state, head, embedded, torch.bfloat16)
    exact = logits_of(theirs, state, head, embedded, torch.float32)
    within("logits", got, measure, exact)
