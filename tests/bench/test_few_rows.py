"""The rule for few rows against the committed times of both methods."""

import json

import pytest

from bench import result_file
from bench.shapes import SHAPES
from replayssm_jax import backend

MOST_ROWS = 16


def times_of_methods():
    """Microseconds of a decode step at the true flush rate by (shape, rows) and method."""
    times = {}
    for record in json.loads((result_file.RESULTS / "kernel_decode.json").read_text())["records"]:
        plain = record["op"] == "decode" and record["window"] == 1 and record["state"] == "fp32"
        if plain and record["batch"] <= MOST_ROWS and record["buffer_length"] == 16:
            phases = "random" if record["method"] == "replay" else "synchronised"
            if record["method"] in ("replay", "eager") and record["phases"] == phases:
                times.setdefault((record["shape"], record["batch"]), {})[record["method"]] = record["time_us"]
    return {key: methods for key, methods in times.items() if len(methods) == 2}


@pytest.mark.parametrize(("key", "methods"), times_of_methods().items(), ids=str)
def test_the_method_of_few_rows_is_within_a_hundredth_of_the_better(key, methods):
    shape, rows = key
    chosen = "eager" if backend.eager_is_sooner(SHAPES[shape], rows) else "replay"
    assert min(methods.values()) / methods[chosen] >= 0.99
