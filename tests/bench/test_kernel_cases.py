"""Phases, bytes and cases of the kernel benchmark against figures worked out by hand."""

import numpy as np
import pytest

from bench import kernel_cases
from bench.kernel_cases import BATCHES, MAIN, Case

# One row of `super`: 128 x 64 x 128 float32 elements; an entry of bfloat16 values (128 x 64), bfloat16 keys
# (8 x 128) and 128 float32 scalars.
STATE = 4_194_304
ENTRY = 2 * (8192 + 1024) + 4 * 128
OUTPUT = 2 * 8192
SUPER = Case(shape="super", batch=256, method="replay")


def test_one_token_a_step_visits_every_length_equally_often():
    np.testing.assert_allclose(kernel_cases.stationary(1, 16), [0] + [1 / 16] * 16, atol=1e-12)


@pytest.mark.parametrize(
    ("buffer_length", "law"), [(2, [0, 1 / 2, 1 / 2]), (3, [0, 1 / 3, 1 / 2, 1 / 6])], ids=["L2", "L3"]
)
def test_two_tokens_a_step_by_hand(buffer_length, law):
    # L = 3: from 1 to 2 or 3, from 2 or 3 (a flush) to 1 or 2; so p1 = (p2 + p3) / 2 and p3 = p1 / 2.
    np.testing.assert_allclose(kernel_cases.stationary(2, buffer_length), law, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 256])
def test_rows_flush_at_the_true_rate(batch):
    lengths = kernel_cases.phases(batch, 1, 16)
    assert lengths.shape[1] == batch
    counts = np.bincount(lengths.ravel(), minlength=17)
    assert counts[0] == 0
    assert len(set(counts[1:])) == 1


def test_phases_of_several_tokens_follow_the_law():
    counts = np.bincount(kernel_cases.phases(1024, 4, 16).ravel(), minlength=17)
    assert np.abs(counts / 1024 - kernel_cases.stationary(4, 16)).max() <= 1 / 1024


@pytest.mark.parametrize(
    ("length", "row_bytes"),
    [(8, STATE + 8 * ENTRY + 2 * ENTRY + OUTPUT), (16, 2 * STATE + 16 * ENTRY + 2 * ENTRY + OUTPUT)],
    ids=["nonflush", "flush"],
)
def test_bytes_of_a_step_by_hand(length, row_bytes):
    lengths = np.full((1, 256), length)
    found = kernel_cases.bounds(SUPER, lengths, lengths == 16)
    assert found["bytes"] == 256 * row_bytes
    rewritten = 2 * STATE if length == 16 else 0
    wanted = 256 * ((row_bytes - rewritten) / 4.58e6 + rewritten / 4.29e6)
    assert found["floor_us"] == pytest.approx(wanted, abs=0.005)


def test_bytes_of_a_cycle_are_the_mean_of_its_steps():
    cycle = np.arange(1, 17)[:, None].repeat(256, axis=1)
    mixed = kernel_cases.phases(256, 1, 16)
    assert kernel_cases.bounds(SUPER, cycle, cycle == 16) == kernel_cases.bounds(SUPER, mixed, mixed == 16)


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_programs_flush_when_they_say_so(tokens):
    case = Case(shape="q122", batch=64, method="replay", tokens=tokens)
    programs = {(operation, phase): lengths for operation, phase, lengths in kernel_cases.programs(case)}
    assert not (programs["nonflush", "synchronised"] + tokens > 16).any()
    assert (programs["flush", "synchronised"] + tokens > 16).all()
    assert (("decode", "synchronised") in programs) == (tokens == 1)
    assert ("decode" if tokens == 1 else "verify", "random") in programs


def test_cases_are_distinct_and_the_headline_comes_first():
    cases = kernel_cases.cases(MAIN, BATCHES, peers=True)
    assert len(set(cases)) == len(cases)
    assert str(cases[0]) == "super batch 256 replay T 1 fp32 L 16"
    assert all(case.batch == 256 for case in cases if case.tokens != 1 or case.state != "fp32")
    assert {case.batch for case in cases if case.method == "replay"} == set(BATCHES)


def test_no_peers_without_their_folder():
    assert not [case for case in kernel_cases.cases(MAIN, BATCHES, peers=False) if "peer" in case.method]


def test_record_has_the_fields_of_a_timing():
    times = np.array([3.0, 1.0, 2.0])
    found = kernel_cases.record(SUPER, times, "decode", "random", bytes=1, floor_us=0.5)
    assert set(found) == {
        "shape", "batch", "method", "implementation", "op", "state", "recurrence", "window", "buffer_length",
        "phases", "time_us", "spread_us", "bytes", "floor_us",
    }  # fmt: skip
    assert (found["time_us"], found["spread_us"]) == (2.0, [1.2, 2.8])


def test_times_of_a_cycle_are_averaged_a_pass():
    assert kernel_cases.step_means([1.0, 3.0, 2.0, 6.0], 2).tolist() == [2.0, 4.0]
