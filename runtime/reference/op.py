"""Base class of the reference ops: strict attributes, and one error form that names the node."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx
from onnx.reference.op_run import OpRun

DOMAIN = "m3"


class OpError(ValueError):
    """A node of domain `m3` has wrong attributes or got inputs that do not fit together."""


class M3Op(OpRun):
    """An op of domain `m3`. The class name is the op type; `fields` lists its attributes.

    ONNX's evaluator passes the attributes to `_run` as keyword arguments.
    """

    op_domain = DOMAIN
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        super().__init__(onnx_node, run_params)
        found = {attribute.name for attribute in onnx_node.attribute}
        missing, unknown = sorted(set(self.fields) - found), sorted(found - set(self.fields))
        if missing or unknown:
            raise self.error(f"missing attributes {missing}, unknown attributes {unknown}")

    def error(self, problem: str) -> OpError:
        return OpError(f"{self.onnx_node.op_type} node {self.onnx_node.name!r}: {problem}")
