from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from m3trt.runtime.weights import WeightFileError, find_weights, map_weights, match_weights
from safetensors.numpy import save_file

pytestmark = pytest.mark.smoke


@pytest.fixture
def weights(rng):
    return {
        "b.weight": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "a.weight": rng.standard_normal(4).astype(np.float32),
        "empty": np.empty((0, 2), np.float32),
        "quantised": rng.standard_normal((2, 2)).astype(ml_dtypes.float8_e4m3fn),
    }


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_tensors_are_read_only_views_of_the_file(tmp_path, weights):
    path = tmp_path / "rank0.safetensors"
    save_file(weights, path)
    found = map_weights(path, find_weights(path))
    assert found.keys() == weights.keys()
    for name, array in found.items():
        assert array.dtype == weights[name].dtype
        assert array.tobytes() == weights[name].tobytes()
        assert not array.flags.owndata
        assert not array.flags.writeable


@pytest.mark.parametrize("size", [4, 100, -1], ids=["no-header", "half-header", "last-byte"])
def test_truncated(tmp_path, weights, size):
    path = tmp_path / "rank0.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightFileError, match=r"rank0\.safetensors.*truncated"):
        find_weights(path)


def test_a_broken_link_names_the_next_step(tmp_path):
    path = tmp_path / "rank0.safetensors"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(WeightFileError, match=r"does not exist: run m3trt\.convert"):
        find_weights(path)


def test_every_difference_is_listed(tmp_path, weights):
    expected = {name: (array.dtype, array.shape) for name, array in weights.items()}
    save_file(weights, tmp_path / "rank0.safetensors")
    found = find_weights(tmp_path / "rank0.safetensors")
    match_weights(tmp_path, found, expected)
    expected["a.weight"] = (np.dtype(np.float32), (5,))
    expected["c.weight"] = expected.pop("empty")
    with pytest.raises(WeightFileError) as error:
        match_weights(tmp_path, found, expected)
    for part in (
        "missing c.weight",
        "unexpected empty",
        "a.weight is float32 [4], expected float32 [5]",
    ):
        assert part in str(error.value)
