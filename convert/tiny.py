"""Writes a tiny random MiniMax-M3 checkpoint: released tensor names and `config.json` spelling.

python -m m3trt.convert.tiny --output_dir DIR [--geometry demo] [--seed 0] [--mxfp8]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from m3trt.convert.directory import new_directory
from m3trt.convert.interrupt import EXIT_CODE, interruptible
from m3trt.convert.tiny_config import GEOMETRIES, quantization_config, tiny_config
from m3trt.convert.tiny_tokenizer import head_bias, train_tokenizer, write_tokenizer_files
from m3trt.convert.tiny_weights import ConstantChannel, draw, plan_tensors, quantise_mxfp8

Tensors = dict[str, npt.NDArray[Any]]

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def write_tiny_checkpoint(
    output_dir: Path,
    geometry: str = "small",
    seed: int = 0,
    *,
    dtype: str = "bfloat16",
    mxfp8: bool = False,
    num_shards: int = 2,
) -> None:
    """Write a checkpoint of one of `GEOMETRIES`, complete or not at all.

    The same arguments always give the same bytes. Router, routing bias and patch embedding stay
    float32 as in the release; `mxfp8` stores text linears as e4m3 with E8M0 scales. Geometry
    `demo` also gets tokenizer, chat template, generation and preprocessor configuration.

    Raises:
        ValueError: unknown geometry or dtype.
        ConvertError: `output_dir` exists.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}, expected one of {sorted(DTYPES)}")
    config = tiny_config(geometry, dtype)
    if mxfp8:
        config["quantization_config"] = quantization_config(config["text_config"])
    with new_directory(output_dir) as directory:
        constant = _write_text_side(directory, config["text_config"]["vocab_size"], geometry)
        tensors = _tensors(config, seed, DTYPES[dtype], mxfp8, constant)
        _write_shards(directory, dict(tensors), num_shards)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_text_side(output_dir: Path, vocab_size: int, geometry: str) -> ConstantChannel | None:
    if geometry != "demo":
        return None
    tokenizer = train_tokenizer()
    write_tokenizer_files(output_dir, tokenizer)
    return ConstantChannel(value=2.0, norm_weight=7.0, head=head_bias(tokenizer, vocab_size))


def _tensors(
    config: dict[str, Any],
    seed: int,
    dtype: np.dtype[Any],
    mxfp8: bool,
    constant: ConstantChannel | None,
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for plan in plan_tensors(config):
        values = draw(plan, seed, constant)
        if mxfp8 and plan.kind == "linear":
            quantised, scales = quantise_mxfp8(values)
            yield plan.name, quantised
            yield f"{plan.name}_scale_inv", scales
        else:
            yield plan.name, values if plan.keep_float32 else values.astype(dtype)


def _write_shards(output_dir: Path, tensors: Tensors, num_shards: int) -> None:
    """Spread the tensors over the shards by size, in order, and write the index."""
    from safetensors.numpy import save_file

    total = sum(array.nbytes for array in tensors.values())
    shards: list[Tensors] = [{} for _ in range(num_shards)]
    weight_map, done = {}, 0
    for name, array in tensors.items():
        shard = min(done * num_shards // total, num_shards - 1)
        shards[shard][name] = array
        weight_map[name] = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        done += array.nbytes
    for shard, content in enumerate(shards):
        file = output_dir / f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file(content, file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.convert.tiny",
        description="Write a tiny random MiniMax-M3 checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="new directory")
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="demo", help="sizes")
    parser.add_argument("--seed", type=int, default=0, help="seed of all weights")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="weight type")
    parser.add_argument("--mxfp8", action="store_true", help="quantise text linears to MXFP8")
    args = parser.parse_args(argv)
    try:
        with interruptible():
            write_tiny_checkpoint(
                args.output_dir, args.geometry, args.seed, dtype=args.dtype, mxfp8=args.mxfp8
            )
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_CODE
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(args.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
