"""`python -m m3trt.convert`: from a Hugging Face checkpoint to a checkpoint directory."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from m3trt.convert.interrupt import EXIT_CODE, interruptible

logger = logging.getLogger(__name__)


MAX_WORKERS = 64
"""Each holds up to 30 MB."""


def _number(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {most}")
        return int(text)

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.convert",
        description="Convert a MiniMax-M3 checkpoint (bf16 or MXFP8) for `m3trt.build`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model_dir", type=Path, required=True, help="Hugging Face checkpoint to read")
    add("--output_dir", type=Path, default="tllm_checkpoint", help="directory to create")
    add(
        "--tp_size",
        type=_number(1024),
        default=1,
        help="tensor-parallel ranks to cut the weights for",
    )
    add(
        "--workers",
        type=_number(MAX_WORKERS),
        default=4,
        help="threads that read, convert and write",
    )
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="dtype of the weights; auto is the checkpoint's own",
    )
    add("--save_config_only", action="store_true", help="write config.json but no weights")
    add("--dry_run", action="store_true", help="check everything but the values, write nothing")
    add("--log_level", choices=("debug", "info", "warning", "error"), default="info", help=" ")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 1 with one sentence on stderr, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=arguments.log_level.upper(), format="%(levelname)s %(message)s"
    )
    try:
        with interruptible():
            return _convert(arguments)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_CODE
    except (ValueError, OSError) as error:
        logger.debug("where it happened", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


def _convert(arguments: argparse.Namespace) -> int:
    from m3trt.convert.checkpoint import check_space, write_config, write_weights
    from m3trt.convert.directory import check_output, new_directory
    from m3trt.convert.hf_config import load_source
    from m3trt.convert.plan import make_plan
    from m3trt.convert.progress import peak_rss_bytes
    from m3trt.convert.reader import read_checkpoint

    start = time.monotonic()
    model_dir, output_dir = arguments.model_dir, arguments.output_dir
    model = load_source(model_dir, arguments.dtype, arguments.tp_size)
    if not arguments.dry_run:
        check_output(output_dir)
    if arguments.save_config_only:
        if not arguments.dry_run:
            with new_directory(output_dir) as directory:
                write_config(model_dir, directory, model.config)
        print(f"{output_dir}: config.json for tp_size {arguments.tp_size}, no weights")
        return 0
    plan = make_plan(model, read_checkpoint(model_dir))
    if arguments.dry_run:
        for name, tensors in plan.files.items():
            print(f"{name}: {len(tensors)} tensors, {plan.file_bytes(name) / 1e9:.2f} GB")
        print(f"read {plan.source_bytes / 1e9:.2f} GB, write {plan.output_bytes / 1e9:.2f} GB")
        return 0
    check_space(plan, output_dir)
    logger.info(
        "%s: %.2f GB in %d tensors -> %d files, %.2f GB",
        model_dir,
        plan.source_bytes / 1e9,
        len(plan.jobs),
        len(plan.files),
        plan.output_bytes / 1e9,
    )
    with new_directory(output_dir) as directory:
        write_config(model_dir, directory, model.config)
        write_weights(plan, directory, arguments.workers)
    print(
        f"{output_dir}: {plan.output_bytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s,"
        f" peak RSS {peak_rss_bytes() / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
