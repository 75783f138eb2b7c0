"""What a bench says on a machine that it cannot run on."""

from __future__ import annotations

import argparse

from m3trt.runtime.tensorrt.memory import import_torch


def require_gpus(parser: argparse.ArgumentParser, count: int = 1) -> None:
    """End the command with a sentence unless torch has `count` GPUs."""
    torch = import_torch()
    found = torch.cuda.device_count()
    if found >= count:
        return
    why = "" if torch.version.cuda else f": torch {torch.__version__} is a build without CUDA"
    wanted = f"{count} GPU" + ("s" if count > 1 else "")
    parser.exit(1, f"error: {parser.prog} needs {wanted} and found {found}{why}\n")
