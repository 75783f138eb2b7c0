"""Turns the weight rules into copy jobs for one checkpoint, and checks it on the way.

Nothing of the data is read here: a checkpoint that does not fit its config fails within seconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from m3trt.convert.configuration import M3Config
from m3trt.convert.dtypes import FLOATS, SCALE_BLOCK
from m3trt.convert.errors import ConvertError, listed
from m3trt.convert.hf_config import SourceModel
from m3trt.convert.layout import TensorSpec, expert_stack, rank_tensors, vision_tensors
from m3trt.convert.reader import StoredTensor
from m3trt.convert.weights import (
    TEXT_RULES,
    VISION_RULES,
    Rule,
    Shard,
    Transform,
    Where,
    dimensions,
)

VISION_FILE = "vision.safetensors"
SCALE_SUFFIX = "_scale_inv"
IGNORED = re.compile(r"(^|\.)mtp\.")
"""Multi-token prediction: named in configs, not part of the served model."""


class Copy(NamedTuple):
    """A rectangle of a source, stored contiguously in `file` from element `first` of `target`."""

    file: str
    target: str
    first: int
    rows: range
    columns: range


class Job(NamedTuple):
    """One source tensor, seen as [rows, columns], and everything that is made of it."""

    source: StoredTensor
    scales: StoredTensor | None
    rows: int
    columns: int
    dtype: str
    transform: Transform
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.source.num_bytes + (self.scales.num_bytes if self.scales else 0)


class Plan(NamedTuple):
    """The files to write and the jobs that fill them, in the order of the source's files."""

    files: dict[str, dict[str, TensorSpec]]
    jobs: list[Job]

    @property
    def source_bytes(self) -> int:
        return sum(job.num_bytes for job in self.jobs)

    def file_bytes(self, file: str) -> int:
        return sum(spec.num_bytes for spec in self.files[file].values())

    @property
    def output_bytes(self) -> int:
        return sum(map(self.file_bytes, self.files))


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def layout_files(config: M3Config) -> dict[str, dict[str, TensorSpec]]:
    """Every weight file of the checkpoint directory with its tensors."""
    tensors = rank_tensors(config)
    files = {rank_file(rank): tensors for rank in range(config.tp_size)}
    if config.vision:
        files[VISION_FILE] = vision_tensors(config)
    return files


def make_plan(model: SourceModel, stored: dict[str, StoredTensor]) -> Plan:
    """Match every stored tensor with a rule and every target with its sources.

    Raises:
        ConvertError: tensors are missing, unexpected, or of another shape or dtype.
    """
    config = model.config
    files = layout_files(config)
    matcher = _Matcher(model, stored)
    ranks = [rank_file(rank) for rank in range(config.tp_size)]
    jobs = list(matcher.jobs(TEXT_RULES, ranks, files[ranks[0]]))
    if config.vision:
        jobs += matcher.jobs(VISION_RULES, [VISION_FILE], files[VISION_FILE])
    matcher.check_leftovers()
    jobs.sort(key=lambda job: (job.source.path, job.source.offset))
    return Plan(files, jobs)


class _Matcher:
    def __init__(self, model: SourceModel, stored: dict[str, StoredTensor]) -> None:
        self.config, self.quantization, self.stored = model.config, model.quantization, stored
        self.sizes = dimensions(model.config)
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def jobs(
        self, rules: tuple[Rule, ...], files: list[str], specs: dict[str, TensorSpec]
    ) -> Iterator[Job]:
        """One job for each source of `rules`; `files` all have the tensors `specs`."""
        filled = dict.fromkeys(specs, 0)
        for rule, source, target in expand(rules, self.config):
            shape = tuple(self.sizes[symbol] for symbol in rule.shape.split())
            rows, columns = shape[0], prod(shape[1:])
            first, copies = filled[target], []
            for rank, file in enumerate(files):
                part = self._part(rule.shard, rank, rows, columns)
                copies.append(Copy(file, target, first, *part))
            filled[target] += len(copies[0].rows) * len(copies[0].columns)
            found, scales = self._find(rule, source, shape)
            if found:
                dtype = specs[target].dtype
                yield Job(found, scales, rows, columns, dtype, rule.transform, tuple(copies))
        partial = [n for n, spec in specs.items() if filled[n] != prod(spec.shape)]
        if partial:
            raise ConvertError(f"the weight rules do not fill {listed(partial)}")

    def _part(self, shard: Shard, rank: int, rows: int, columns: int) -> tuple[range, range]:
        """The rows and columns of a source that belong to `rank`."""
        ranks, heads = self.config.tp_size, self.config.num_key_value_heads
        if shard is Shard.ROWS:
            return _slice(rows // ranks, rank), range(columns)
        if shard is Shard.COLUMNS:
            return range(rows), _slice(columns // ranks, rank)
        if shard is Shard.KV_ROWS:
            head, first = rows // heads, rank * heads // ranks
            last = first + self.config.local_num_key_value_heads
            return range(first * head, last * head), range(columns)
        return range(rows), range(columns)

    def _find(
        self, rule: Rule, name: str, shape: tuple[int, ...]
    ) -> tuple[StoredTensor | None, StoredTensor | None]:
        quantised = rule.linear and self.quantization is not None and self.quantization.covers(name)
        found = self._take(name, shape, ("F8_E4M3",) if quantised else FLOATS)
        if not quantised:
            return found, None
        if shape[1] % SCALE_BLOCK:
            self.wrong.append(f"{name} has {shape[1]} inputs, expected a multiple of {SCALE_BLOCK}")
            return None, None
        scales = (shape[0], shape[1] // SCALE_BLOCK)
        return found, self._take(name + SCALE_SUFFIX, scales, ("U8", "F8_E8M0"))

    def _take(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
    ) -> StoredTensor | None:
        found = self.stored.get(name)
        if found is None:
            self.missing.append(name)
            return None
        self.used.add(name)
        if found.shape != shape or found.dtype not in dtypes:
            self.wrong.append(f"{found}, expected {' or '.join(dtypes)} {list(shape)}")
        return found

    def check_leftovers(self) -> None:
        """Raise one error that lists everything that does not match."""
        unexpected = [
            f"{tensor.path.name}: {name}"
            for name, tensor in self.stored.items()
            if name not in self.used and not IGNORED.search(name)
        ]
        folder = next((tensor.path.parent for tensor in self.stored.values()), "the checkpoint")
        problems = [
            f"{len(items)} tensors {what}: {listed(items)}"
            for what, items in (
                ("have another shape or dtype than config.json says", self.wrong),
                ("are missing", self.missing),
                ("are unexpected, no rule reads them", unexpected),
            )
            if items
        ]
        if problems:
            raise ConvertError(f"{folder}: " + ". ".join(problems))


def _slice(size: int, index: int) -> range:
    return range(index * size, (index + 1) * size)


def expand(rules: tuple[Rule, ...], config: M3Config) -> Iterator[tuple[Rule, str, str]]:
    """Every (rule, source name, target name), in the order in which targets are stacked."""
    layers = {
        Where.ALL: range(config.num_hidden_layers),
        Where.SPARSE: [i for i, flag in enumerate(config.sparse_layers) if flag],
        Where.DENSE_MLP: [i for i, flag in enumerate(config.moe_layers) if not flag],
        Where.MOE: [i for i, flag in enumerate(config.moe_layers) if flag],
        Where.VISION: range(config.vision.num_hidden_layers if config.vision else 0),
        Where.ONCE: [0],
    }
    for rule in rules:
        if "{expert}" not in rule.source:
            for layer in layers[rule.where]:
                yield rule, rule.source.format(layer=layer), rule.target.format(layer=layer)
    expert_rules = [rule for rule in rules if "{expert}" in rule.source]
    experts, parts = config.moe.num_experts, config.expert_parts
    for layer, expert, rule in itertools.product(layers[Where.MOE], range(experts), expert_rules):
        stem = rule.target.format(layer=layer).removesuffix(".weight")
        target = expert_stack(stem, expert // (experts // parts), parts)
        yield rule, rule.source.format(layer=layer, expert=expert), target
