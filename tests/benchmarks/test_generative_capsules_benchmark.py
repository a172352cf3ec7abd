"""The script that runs another program reads the arrays of its files, and nothing else in them."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest


def test_a_file_of_scenes_holds_arrays_alone(load_benchmark):
    def read(value):
        return arrays(io.BytesIO(pickle.dumps(value, protocol=4))).load()

    arrays = load_benchmark("generative_capsules").Arrays
    points = np.arange(6.0).reshape(3, 2)
    assert np.array_equal(read({"points": points})["points"], points)
    with pytest.raises(ValueError, match="arrays alone"):
        read({"points": Path("anywhere")})
