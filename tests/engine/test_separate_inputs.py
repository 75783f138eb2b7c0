"""Every op type of an engine reads small inputs of a step that are its own."""

from __future__ import annotations

import onnx
import pytest
from m3trt.build.configuration import BuildConfig
from m3trt.build.network import build_text_network
from m3trt.build.separate_inputs import SHARED, original, separate_inputs

pytestmark = pytest.mark.smoke


def test_no_two_op_types_share_an_input(tiny):
    config = tiny()
    model = build_text_network(config, BuildConfig.for_model(config), 0)
    before = [value.name for value in model.graph.input]
    read = [[original(name) for name in node.input] for node in model.graph.node]
    separate_inputs(model)

    onnx.checker.check_model(model, full_check=True)
    names = [value.name for value in model.graph.input]
    assert len(set(names)) == len(names)
    assert {original(name) for name in names} == set(before)
    assert [[original(name) for name in node.input] for node in model.graph.node] == read
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            if original(name) in SHARED:
                readers.setdefault(name, set()).add(node.op_type)
    assert {len(types) for types in readers.values()} == {1}
    assert {"M3BlockSelect", "M3SparseAttention", "M3MoE"} <= set().union(*readers.values())
