"""Real drafts of an embedded checkpoint: all methods give the same text."""

import pytest

import replayssm_jax as rs
from bench.real_drafts import measure, table


@pytest.mark.slow
@pytest.mark.long
def test_four_methods_decode_the_same_text():
    loaded = rs.load("tiny-nemotron-h")
    records = measure(loaded, 2, 24, {"ngram": rs.Speculative("ngram", 2)}, 1, rs.ReplayConfig())
    assert [(r["method"], r["window"]) for r in records] == [
        ("eager", 1), ("replay", 1), ("replay", 3), ("conventional", 3)
    ]  # fmt: skip
    assert all(r["equal"] == 2 for r in records)
    assert records[2]["committed"] == records[3]["committed"] >= records[0]["committed"] == 1.0
    assert len(table(records).splitlines()) == 5
