"""Bytes of a step against counts by hand and against the arrays' true sizes; ring phases in the long run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench import result_file
from bench.e2e_models import depth_cut, published, with_head
from bench.roofline import (
    DATA_SHEET_FLOPS,
    Ceilings,
    Part,
    bounds,
    bounds_of,
    floor,
    floor_parts_of,
    histogram,
    phases,
    step_parts,
    total_bytes,
)
from models.checkpoint import abstract_model
from replayssm_jax.cache import cache_bytes
from replayssm_jax.config import ReplayConfig

ALWAYS_THREE = (0.0, 0.0, 1.0)


def test_plain_replay_flushes_every_buffer_length_steps():
    long_run = phases((1.0,), 16)
    assert long_run.flushing == pytest.approx(1 / 16)
    assert long_run.length == pytest.approx(np.arange(1, 17).mean())


def test_full_acceptance_cycles_through_multiples_of_the_window():
    """L = 16, T = 4: lengths 4, 8, 12, 16, of which 16 flushes."""
    long_run = phases((0.0, 0.0, 0.0, 1.0), 16)
    assert long_run.flushing == pytest.approx(1 / 4)
    assert long_run.length == pytest.approx(10.0)
    np.testing.assert_allclose(long_run.probability[[4, 8, 12, 16]], 0.25, atol=1e-12)


def test_phases_are_those_of_a_long_simulation():
    accepted = histogram(4, 2.5)
    rng, length, seen, flushed = np.random.default_rng(0), 0, [], 0
    for count in rng.choice(np.arange(1, 5), 20_000, p=accepted):
        seen.append(length)
        if length + 4 > 11:
            length, flushed = 0, flushed + 1
        length += count
    long_run = phases(accepted, 11)
    # Successive lengths are nearly periodic, so errors are below those of 20,000 independent draws.
    assert long_run.flushing == pytest.approx(flushed / 20_000, abs=5 * 0.5 / np.sqrt(20_000))
    assert long_run.length == pytest.approx(np.mean(seen), abs=5 * 4.0 / np.sqrt(20_000))


@pytest.mark.parametrize(("tokens", "mean"), [(1, 1.0), (4, 3.0), (8, 1.0), (8, 8.0)])
def test_histogram_has_its_mean(tokens, mean):
    odds = np.array(histogram(tokens, mean))
    assert odds.sum() == pytest.approx(1.0)
    assert odds @ np.arange(1, tokens + 1) == pytest.approx(mean)


def test_impossible_requests_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"1\.\.4 committed tokens cannot be 4.5"):
        histogram(4, 4.5)
    with pytest.raises(ValueError, match="buffer_length must be at least 3, got 2"):
        phases(ALWAYS_THREE, 2)
    with pytest.raises(ValueError, match="one token, got the probabilities of 3"):
        step_parts(published("nano-4b"), "eager", 1, accepted=ALWAYS_THREE)
    with pytest.raises(ValueError, match="got 'lazy'"):
        step_parts(published("nano-4b"), "lazy", 1)


def test_bytes_of_nano_4b_by_hand():
    """21 Mamba-2 layers (96 heads x 80 x 128, 8 groups), 4 attention layers (40 query, 8 key heads x 128) and
    17 MLPs (3136 x 12544), hidden 3136."""
    parts = step_parts(published("nano-4b"), "eager", 2, context=100.0)
    assert parts["state"] == Part(copied=2 * 2 * 21 * 96 * 80 * 128 * 4)
    mamba = 3136 * (2 * 7680 + 2 * 1024 + 96) + 7680 * 3136
    attention = 3136 * 128 * (2 * 40 + 2 * 8)
    weights = 21 * mamba + 4 * attention + 17 * 2 * 3136 * 12544
    assert parts["weights"] == Part(read=2 * weights, flops=2 * weights * 2)
    assert parts["head"] == Part(read=2 * 131072 * 3136, flops=2 * 131072 * 3136 * 2)
    assert parts["kv"].read == 100 * 2 * 4 * 2 * 8 * 128 * 2
    assert parts["conv"] == Part(read=3 * 2 * 21 * 9728 * 2, copied=2 * 21 * 9728 * 2)
    assert parts["logits"] == Part(copied=2 * 2 * 131072 * 4)
    assert parts["ring"] == Part()


@pytest.mark.parametrize("name", ["nano-4b", "qwen3.5-4b"])
def test_bytes_are_the_sizes_of_the_cache(name):
    """A window of 3 always accepted whole, L = 9: three lengths 3, 6, 9 of which 9 flushes."""
    config, rows, context = depth_cut(published(name), 8), 5, 70
    replay = ReplayConfig(buffer_length=9, window=3, implementation="xla")
    specs = abstract_model(config, jnp.dtype(jnp.bfloat16)).cache_specs()
    sizes = cache_bytes(specs, context, replay, jnp.bfloat16)
    options = {"accepted": ALWAYS_THREE, "buffer_length": 9, "context": float(context)}
    parts = step_parts(config, "replay", rows, **options)
    state, entry = rows * sizes["checkpoint"], rows * sizes["ring"] / 12
    assert parts["state"].read == pytest.approx(state * 2 / 3)
    assert parts["state"].copied == pytest.approx(2 * state / 3)
    assert parts["ring"].read == pytest.approx(6 * entry)
    assert parts["ring"].copied == pytest.approx(3 * entry)
    assert parts["kv"].read == rows * sizes["kv"]
    assert parts["conv"].bytes == rows * sizes["conv"]
    conventional = step_parts(config, "conventional", rows, **options)
    assert conventional["state"] == Part(copied=4 * state)
    assert total_bytes(conventional) - total_bytes(parts) == pytest.approx(
        4 * state - parts["state"].bytes - parts["ring"].bytes
    )


def test_bytes_of_a_read_copy_by_hand():
    """L = 16, one token a step: one row in 16 flushes. NVFP4 has 4 bits, a byte for 16 and four for 128."""
    config = depth_cut(published("nano-4b"), 1)
    elements = 2 * 96 * 80 * 128
    copy = elements * (4 / 8 + 1 / 16 + 4 / 128)
    parts = step_parts(config, "replay", 2, recurrence="fp16", read="nvfp4")
    assert parts["state"].read == pytest.approx(copy * 15 / 16)
    assert parts["state"].copied == pytest.approx((2 * 2 * elements + copy) / 16)
    assert step_parts(config, "replay", 2)["state"].copied == pytest.approx(2 * 4 * elements / 16)


def test_a_part_takes_the_larger_of_bytes_and_operations():
    ceilings = Ceilings(read=100.0, copy=50.0, flops=1000.0)
    assert Part(read=300.0, copied=100.0).seconds(ceilings) == 5.0
    assert Part(read=300.0, flops=4000.0).seconds(ceilings) == 4.0
    assert floor({"a": Part(read=100.0), "b": Part(flops=2000.0)}, ceilings) == 3.0


def test_bounds_compare_tokens_a_second_at_the_floors():
    config, accepted = depth_cut(published("nano-4b"), 4), histogram(4, 3.0)
    # Bytes at one speed, for reads and copies alike.
    bytes_alone = Ceilings(read=1e-3, copy=1e-3, flops=1e300)
    parts = {
        method: sum(part.bytes for part in step_parts(config, method, 1, accepted=odds).values())
        for method, odds in (("replay", accepted), ("conventional", accepted), ("eager", (1.0,)))
    }
    assert bounds(config, 1, bytes_alone, accepted=accepted) == pytest.approx(
        {
            "conventional": parts["conventional"] / parts["replay"],
            "eager": 3 * parts["eager"] / parts["replay"],
        }
    )
    # Products alone cost both methods the same, and four times those of one token.
    products_alone = Ceilings(read=1e300, copy=1e300, flops=1.0)
    assert bounds(config, 1, products_alone, accepted=accepted) == pytest.approx(
        {"conventional": 1.0, "eager": 3 / 4}
    )


def test_a_record_without_bounds_gets_those_of_its_sizes():
    record = {
        "shape": "nano-4b",
        "layers": 4,
        "depth_cut": True,
        "batch": 8,
        "window": 4,
        "buffer_length": 16,
    }
    record |= {"accepted": 3.0, "context": 600}
    config = depth_cut(published("nano-4b"), 4)
    expected = bounds(config, 8, Ceilings(), accepted=histogram(4, 3.0), context=600)
    assert bounds_of(record) == expected
    assert bounds_of(record | {"bounds": {"eager": 1.0}}) == {"eager": 1.0}
    assert bounds_of(record | {"window": 1}) == {}


@pytest.mark.parametrize(
    ("method", "window", "drafted"),
    [("eager", 1, {}), ("replay", 1, {}), ("conventional", 4, {}), ("replay", 4, {"drafter": "mtp"})],
)
def test_the_floor_of_a_record_is_that_of_its_sizes(method, window, drafted):
    record = {
        "shape": "qwen3.5-4b",
        "layers": 4,
        "depth_cut": True,
        "method": method,
        "batch": 8,
        "window": window,
        "accepted": 1.0 if window == 1 else 3.0,
        "buffer_length": 32,
        "context": 600,
        "recurrence": "fp32",
        "state": "bf16",
        # As a record may say that was written with other ceilings.
        "floor_parts_us": {"state": 1.0},
    }
    config = depth_cut(published("qwen3.5-4b"), 4)
    sizes = {"accepted": histogram(window, record["accepted"]), "buffer_length": 32, "context": 600}
    network = with_head(config) if drafted else config
    parts = step_parts(network, method, 8, recurrence="fp32", read="bf16", **sizes)
    slow = Ceilings(read=1e6, copy=2e6, flops=3e6)
    expected = {name: part.seconds(slow) * 1e6 for name, part in parts.items()}
    assert floor_parts_of(record | drafted, slow) == pytest.approx(expected)
    assert floor_parts_of(record | drafted) != pytest.approx(expected)


def test_committed_floors_by_the_measured_ceilings_are_found_again():
    found = 0
    for path in result_file.RESULTS.glob("e2e_decode_speedup_*.json"):
        for record in json.loads(path.read_text())["records"]:
            if "floor_data_sheet_us" in record:
                data_sheet = Ceilings(flops=DATA_SHEET_FLOPS)
                for name, ceilings in (("floor_us", Ceilings()), ("floor_data_sheet_us", data_sheet)):
                    # The record has the mean context rounded.
                    again = sum(floor_parts_of(record, ceilings).values())
                    assert again == pytest.approx(record[name], rel=1e-3)
                found += 1
    assert found > 0
