"""How many experts a step of a random engine reads, and how many random routing would choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import expert_stack
from m3trt.runtime.tensorrt.memory import import_torch

MOST_TOKENS = 256
"""Steps of more are not emulated: they choose every expert."""


def expected_experts(config: M3Config, tokens: int) -> float:
    """Distinct experts of a layer that `tokens` choose on average, each top_k of all at random."""
    moe = config.moe
    return moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)


def emulated_experts(weights: Mapping[str, Any], config: M3Config, ids: Any) -> float:
    """Distinct experts a layer that tokens `ids` choose, the mean over the layers, by the engine's
    weights in torch. Attention is left out: over random caches it hardly changes a hidden state."""
    torch = import_torch()

    def weight(name: str, layer: int) -> Any:
        return weights[f"transformer.layers.{layer}.{name}"]

    def norm(x: Any, layer: int) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon)
        return x * scale * weight("post_layernorm.weight", layer)

    def swiglu(x: Any, fc: Any, proj: Any) -> Any:
        gate, up = (x.to(fc.dtype) @ fc.T).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = gate * torch.sigmoid(config.swiglu_alpha * gate) * (up + 1)
        return (inner.to(proj.dtype) @ proj.T).float()

    moe, limit, counts = config.moe, config.swiglu_limit, []
    embedding = weights["transformer.vocab_embedding.weight"]
    x = embedding[torch.as_tensor(ids, device=embedding.device).long()].float()
    for layer in range(config.num_hidden_layers):
        hidden, inner = norm(x, layer), "mlp.shared_expert" if config.moe_layers[layer] else "mlp"
        fc, proj = (weight(f"{inner}.{name}.weight", layer) for name in ("fc", "proj"))
        x = x + swiglu(hidden, fc, proj)
        if not config.moe_layers[layer]:
            continue
        scores = torch.sigmoid(hidden @ weight("mlp.router.weight", layer).T)
        biased = scores + weight("mlp.router.e_score_correction_bias", layer)
        chosen = biased.topk(moe.top_k, dim=-1).indices
        shares = scores.gather(-1, chosen)
        shares = moe.routed_scaling_factor * shares / shares.sum(-1, keepdim=True)
        host = chosen.cpu()  # finding an expert's rows there does not wait for the GPU
        experts = host.unique().tolist()
        counts.append(len(experts))
        each = moe.num_experts // config.expert_parts
        for expert in experts:
            rows, place = (host == expert).nonzero(as_tuple=True)
            stacks = (
                expert_stack(f"mlp.{name}", expert // each, config.expert_parts)
                for name in ("fc", "proj")
            )
            fc, proj = (weight(stack, layer)[expert % each] for stack in stacks)
            x[rows] += shares[rows, place, None] * swiglu(hidden[rows], fc, proj)
    return sum(counts) / len(counts)
