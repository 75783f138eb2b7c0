"""Reading preprocessor_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from m3trt.convert.configuration import ConfigError, VisionConfig
from m3trt.convert.hf_config import load_source
from m3trt.preprocess.image_settings import ImageSettings

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def vision(release_dir: Path) -> VisionConfig:
    vision = load_source(release_dir).config.vision
    assert vision is not None
    return vision


def load(directory: Path, vision: VisionConfig, **content: Any) -> ImageSettings:
    (directory / "preprocessor_config.json").write_text(json.dumps(content))
    return ImageSettings.load(directory, vision)


def test_released_values_without_a_file(tmp_path: Path, vision: VisionConfig) -> None:
    settings = ImageSettings.load(tmp_path, vision)
    assert (settings.min_pixels, settings.max_pixels) == (3136, 451584)
    assert settings.factor == 28


@pytest.mark.full
def test_defaults_equal_reference(
    release_dir: Path, vision: VisionConfig, reference: SimpleNamespace
) -> None:
    settings = ImageSettings.load(release_dir, vision)
    theirs = reference.image_processor
    assert settings.min_pixels == theirs.size["shortest_edge"]
    assert settings.max_pixels == theirs.size["longest_edge"]
    assert settings.rescale_factor == theirs.rescale_factor
    assert list(settings.mean) == list(theirs.image_mean)
    assert list(settings.std) == list(theirs.image_std)


def test_values_are_read(tmp_path: Path, vision: VisionConfig) -> None:
    settings = load(tmp_path, vision, size={"shortest_edge": 784, "longest_edge": 7840})
    assert (settings.min_pixels, settings.max_pixels) == (784, 7840)
    settings = load(
        tmp_path, vision, min_pixels=1000, max_pixels=2000, image_mean=[0.5] * 3, image_std=[1] * 3
    )
    assert (settings.min_pixels, settings.max_pixels) == (1000, 2000)
    assert settings.mean == (0.5, 0.5, 0.5)
    assert settings.std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"patch_size": 16}, "patch_size is 16, the vision tower has 14"),
        ({"img_token_compression_config": {"spatial_merge_size": 3}}, "spatial_merge_size is 3"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"resample": 2}, "resample is 2"),
        ({"size": [100, 100]}, "size is"),
        ({"size": {"height": 100, "width": 100}}, "size is"),
        ({"min_pixels": 10, "max_pixels": 5}, "not a range"),
        ({"image_mean": 0.5}, "image_mean is 0.5"),
        ({"image_std": ["a", "b", "c"]}, "image_std is 'a', expected float"),
        ({"image_std": [1, 0, 1]}, "image_std is 0, expected more than 0"),
        ({"rescale_factor": 0}, "rescale_factor is 0, expected more than 0"),
    ],
)
def test_refused(
    tmp_path: Path, vision: VisionConfig, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, vision, **content)


def test_malformed_file(tmp_path: Path, vision: VisionConfig) -> None:
    for text in ("{", "[]", "\xff"):
        (tmp_path / "preprocessor_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
            ImageSettings.load(tmp_path, vision)
