"""`python -m m3trt.build`: checkpoint directory -> engine directory."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from m3trt.build.configuration import DEFAULT_MULTIMODAL_LEN
from m3trt.build.library import PLUGIN_LIBRARY, RTX_COMPUTE_CAPABILITIES, RUNTIMES
from m3trt.convert.interrupt import EXIT_CODE, interruptible

LOG_LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}


def parser() -> argparse.ArgumentParser:
    """The command line; names and meanings follow `trtllm-build` where it has the option."""
    cli = argparse.ArgumentParser("python -m m3trt.build", description=__doc__, allow_abbrev=False)
    add = cli.add_argument
    add("--checkpoint_dir", type=Path, required=True, help="directory written by m3trt.convert")
    add(
        "--output_dir",
        type=Path,
        default=Path("engine_outputs"),
        help="new directory [%(default)s]",
    )
    add("--max_batch_size", type=int, default=8, help="requests of one step [%(default)s]")
    add("--max_num_tokens", type=int, default=2048, help="packed tokens of one step [%(default)s]")
    add("--max_seq_len", type=int, help="tokens of one sequence [all that model and caches allow]")
    add(
        "--max_multimodal_len",
        "--max_prompt_embedding_table_size",
        type=int,
        help=f"image and video tokens of one step [{DEFAULT_MULTIMODAL_LEN}; 0 without vision]",
    )
    add(
        "--gather_context_logits",
        action="store_true",
        help="allow logits of every prompt token, not only of the last ones",
    )
    for cache in ("kv_cache", "index_cache"):
        add(
            f"--{cache}_dtype",
            choices=("auto", "fp8"),
            default="auto",
            help="auto is the model's dtype [%(default)s]",
        )
    add(
        "--runtime",
        choices=("auto", *RUNTIMES),
        default="auto",
        help="library to build with; auto takes the first that can be imported [%(default)s]",
    )
    add("--plugin_library", type=Path, default=PLUGIN_LIBRARY, help="[%(default)s]")
    add(
        "--compute_capabilities",
        type=_compute_capabilities,
        metavar="80,120",
        help="targets of TensorRT-RTX [this machine's GPU, without one "
        + ",".join(map(str, RTX_COMPUTE_CAPABILITIES))
        + "]",
    )
    add("--workers", type=int, default=1, help="engines built at the same time [%(default)s]")
    add(
        "--input_timing_cache",
        type=Path,
        metavar="ENGINE_DIR",
        help="earlier engine directory whose timing caches to start from (tensorrt only)",
    )
    add("--dry_run", action="store_true", help="check, print the programs, write nothing")
    add("--log_level", choices=LOG_LEVELS, default="info", help="[%(default)s]")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Build; returns 0, 1 after an error that it has printed, or 130 when interrupted."""
    cli = parser()
    options = cli.parse_args(argv)
    if options.workers < 1:
        cli.error(f"--workers {options.workers}, expected at least 1")
    logging.basicConfig(level=LOG_LEVELS[options.log_level], format="%(levelname)s %(message)s")
    try:
        with interruptible():
            return _build(options)
    except (ValueError, RuntimeError, OSError) as error:
        logging.debug("failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_CODE


def _build(options: argparse.Namespace) -> int:
    from m3trt.build.assemble import Compiler, write_engine_dir
    from m3trt.build.configuration import BuildConfig
    from m3trt.build.library import resolve_runtime
    from m3trt.build.programs import make_programs
    from m3trt.convert.configuration import M3Config

    config = M3Config.load(options.checkpoint_dir)
    build = BuildConfig.for_model(
        config,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        max_multimodal_len=options.max_multimodal_len,
        gather_context_logits=options.gather_context_logits,
        kv_cache_dtype=options.kv_cache_dtype,
        index_cache_dtype=options.index_cache_dtype,
    )
    library = resolve_runtime(options.runtime)
    if options.dry_run:
        print(f"library: {library}")
        for name, value in build.to_json().items():
            print(f"{name}: {value}")
        for program in make_programs(config, build):
            graph = program.model.graph
            print(f"{', '.join(program.names)}: {len(graph.node)} nodes, {len(graph.input)} inputs")
        return 0
    compiler = Compiler(
        library,
        options.plugin_library,
        options.compute_capabilities,
        options.workers,
        options.input_timing_cache,
        options.log_level == "verbose",
    )
    write_engine_dir(options.checkpoint_dir, options.output_dir, build, compiler)
    print(options.output_dir)
    return 0


def _compute_capabilities(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 80,120")
    return tuple(sorted({int(part) for part in parts}))


if __name__ == "__main__":
    sys.exit(main())
