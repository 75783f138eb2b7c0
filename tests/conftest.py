"""Fixtures that several test folders share."""

from __future__ import annotations

import importlib.util
import sys

import pytest

LEVELS = ("smoke", "full", "slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test one level, the nearest: `full` on a function overrides its file's `smoke`."""
    nearest = {
        item: next((mark for mark in item.iter_markers() if mark.name in LEVELS), None)
        for item in items
    }
    if unmarked := [item.nodeid for item, mark in nearest.items() if mark is None]:
        raise pytest.UsageError(f"tests without one of the markers {LEVELS}: {unmarked}")
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in LEVELS]
    for item, mark in nearest.items():
        if mark is not None:
            item.add_marker(mark.name)


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
