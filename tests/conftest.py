"""Fixtures that several test folders share."""

from __future__ import annotations

import importlib.util
import sys

import pytest


@pytest.fixture(scope="session")
def importable_torchvision() -> None:
    """Make transformers' multimodal classes importable. PyPI's torchvision is a CUDA build whose
    C library does not load beside a CPU torch; with the two operators that it registers declared,
    its Python part imports."""
    import torch

    if importlib.util.find_spec("torchvision") is None:
        pytest.fail("the test environment lacks torchvision: install it with --no-deps")
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou) -> Tensor")
        import torchvision

        torchvision._declared_operators = library
