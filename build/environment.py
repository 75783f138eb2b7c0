"""What an engine was built with, and how it differs from what is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3trt.build.configuration import check_keys
from m3trt.build.library import (
    RUNTIMES,
    LibraryError,
    describe,
    describe_plugins,
    device_compute_capability,
    resolve_runtime,
)
from m3trt.convert.configuration import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """Library and targets of an engine; a reference engine has neither plugins nor targets."""

    library: str
    library_version: str
    cuda: str | None
    plugin_version: str | None
    plugin_sha256: str | None
    compute_capabilities: tuple[int, ...]

    @classmethod
    def current(
        cls, library: str, plugin_library: Path, compute_capabilities: tuple[int, ...]
    ) -> Environment:
        """That of an engine built now.

        Raises:
            LibraryError: the plugin library is missing or not ours.
        """
        found = describe(library)
        if library == "reference":
            return cls(library, found.version, None, None, None, ())
        plugins = describe_plugins(plugin_library)
        return cls(
            library,
            found.version,
            found.cuda,
            plugins.version,
            plugins.sha256,
            compute_capabilities,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """Read the fields from an engine's config.

        Raises:
            ConfigError: a key is missing or unknown, or the library is unknown.
        """
        check_keys("environment", data, {f.name for f in dataclasses.fields(cls)})
        if data["library"] not in RUNTIMES:
            raise ConfigError(f"library is {data['library']!r}, expected one of {RUNTIMES}")
        found = data["compute_capabilities"]
        if not isinstance(found, list) or not all(type(each) is int for each in found):
            raise ConfigError(f"compute_capabilities is {found!r}, expected a list of numbers")
        return cls(**{**data, "compute_capabilities": tuple(found)})

    def differences(self, library: str, plugin_library: Path) -> list[str]:
        """Why `library` with the plugins at `plugin_library` cannot run the engine, if so."""
        if library != self.library:
            return [f"built for {self.library}, asked to run with {library}"]
        try:
            found = Environment.current(
                resolve_runtime(library), plugin_library, self.compute_capabilities
            )
        except LibraryError as error:
            return [f"built with {library} {self.library_version}, but {error}"]
        problems = [
            f"built with {what} {old}, found {new}"
            for what, old, new in (
                (library, self.library_version, found.library_version),
                ("CUDA", self.cuda, found.cuda),
                ("plugin library version", self.plugin_version, found.plugin_version),
                ("plugin library sha256", self.plugin_sha256, found.plugin_sha256),
            )
            if old != new
        ]
        device = device_compute_capability()
        if device is not None and device not in self.compute_capabilities:
            targets = ", ".join(map(str, self.compute_capabilities))
            problems.append(f"built for compute capabilities {targets}, the GPU has {device}")
        return problems
