"""The timed loop of the end-to-end benchmarks, its processes, and the tables made of them."""

import dataclasses
import os
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from bench import (
    e2e_decode_speedup,
    e2e_models,
    e2e_spec_decode_throughput,
    kernel_table,
    roofline,
)
from bench.decode_loop import Run, Setting, cursors, row_bytes
from bench.kernel_table import Event, by_kind, kernel_times, table
from bench.processes import Task, run_all, run_group

TINY = {
    "model_type": "nemotron_h",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "hybrid_override_pattern": "M-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(e2e_models.PUBLISHED, "tiny", TINY)
    return {"model": "tiny", "batch": 3, "implementation": "xla", "steps": 4, "context": 20, "spread": 5}


@pytest.mark.parametrize("method", ["replay", pytest.param("conventional", marks=pytest.mark.slow)])
def test_a_repeat_commits_the_drawn_counts_and_copies_no_cache(tiny, method):
    setting = Setting(method=method, window=3, mean_accepted=2.0, dispatches=2, **tiny)
    run = Run(setting)
    start, length, accepted = cursors(setting)
    seconds = [run.repeat(), run.repeat()]
    _, _, cache = run._state
    np.testing.assert_array_equal(cache.position, start + length + 2 * accepted.sum(axis=0))
    record = run.record(seconds)
    assert sum(record["floor_parts_us"].values()) == pytest.approx(record["floor_us"], abs=1.0)
    assert ("bounds" in record) == (method == "replay")
    assert run.compilation().items() <= (record | {"op": "compile"}).items()
    assert record["time_us"] == pytest.approx(np.mean(seconds) * 1e6, abs=0.1)
    assert record["cache_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    # Everything donated is reused: cache and tokens.
    assert record["aliased_bytes"] == record["cache_bytes"] + 3 * 3 * 4
    assert record["tokens_per_second"] == pytest.approx(
        3 * accepted.mean() / record["time_us"] * 1e6, rel=1e-3
    )
    assert row_bytes(setting, setting.max_length) * 3 == pytest.approx(
        record["cache_bytes"] + 3 * 3 * 97 * 4, abs=2 * 4 * 4
    )


def test_a_head_drafts_in_a_step_that_commits_the_drawn_counts(tiny):
    setting = Setting(method="replay", window=3, mean_accepted=2.0, drafter="mtp", **tiny)
    run = Run(setting)
    start, length, accepted = cursors(setting)
    seconds = [run.repeat(), run.repeat()]
    _, tokens, cache, state = run._state
    np.testing.assert_array_equal(cache.position, start + length + accepted.sum(axis=0))
    # What waits are the tokens that the last step committed.
    np.testing.assert_array_equal(state.waiting, accepted[-1])
    assert len(set(np.asarray(tokens).ravel().tolist())) > 1
    assert run.record(seconds)["drafter"] == "mtp"


def test_rows_start_in_the_long_run_distribution(tiny):
    setting = Setting(method="replay", window=4, mean_accepted=3.0, **tiny | {"batch": 4000, "steps": 500})
    start, length, accepted = cursors(setting)
    long_run = roofline.phases(setting.accepted, 16)
    # Five standard errors; lengths and counts lie in 0..16 and 1..4.
    assert length.mean() == pytest.approx(long_run.length, abs=5 * length.std() / np.sqrt(4000))
    assert accepted.mean() == pytest.approx(3.0, abs=5 * accepted.std() / np.sqrt(accepted.size))
    assert set(start + length) == set(range(20, 26))
    with pytest.raises(ValueError, match=r"1\.\.1 committed tokens cannot be 3.0"):
        cursors(Setting(method="eager", mean_accepted=3.0, **tiny))


@pytest.mark.parametrize("phases", ["synchronised", "spread"])
def test_phases_repeat_every_window(tiny, phases):
    setting = Setting(method="replay", phases=phases, **tiny | {"batch": 64})
    _, length, _ = cursors(setting)
    counts = np.bincount(length, minlength=17)
    assert counts[0] == 0
    assert (counts.max() - counts[1:].min() <= 2) if phases == "spread" else counts[1] == 64


def test_the_steps_of_a_repeat_are_timed_one_by_one(tiny):
    run = Run(Setting(method="replay", step_times=True, profile=True, dispatches=2, **tiny))
    seconds = [run.repeat() for _ in range(3)]
    record = run.record(seconds[1:])
    assert all(len(times) == 2 * 4 for times in run.step_times)
    for whole, times in zip(seconds, run.step_times, strict=True):
        assert 0 < times.min() and times.sum() < whole * 8 * 1e6
    # The warm-up is left out; the median of two repeats is their mean.
    means = (run.step_times[1] + run.step_times[2]) / 2
    np.testing.assert_allclose(record["step_times_us"], means, atol=0.1)
    assert record["step_us"]["max"] == pytest.approx(means.max(), abs=0.1)
    # A CPU has no kernels; the profiled dispatch leaves the next repeat as it was.
    assert set(record["kernels_us"].values()) == {0.0}
    assert run.repeat() > 0


def test_what_cannot_run_is_left_out_with_the_reason():
    saved = []

    def reason(model, **limits):
        task = Task(setting=Setting(model=model, batch=1, method="eager", implementation="xla"))
        options = {"jobs": 1, "time_limit": 300.0} | limits
        records, left_out = run_all([[task]], save=lambda *both: saved.append(both), **options)
        assert not records and saved[-1] == ([], left_out)
        return left_out[0]["reason"]

    assert reason("nano-4b", time_limit=0.0) == "time limit"
    # 3.97 billion weights in two bytes, 83 MB of state and 9 MB of keys and values among others.
    assert re.fullmatch(r"needs 8\.0 GB of 1\.0 GB", reason("nano-4b", memory=1e9))


@pytest.mark.slow
def test_what_a_process_says_when_it_fails_is_the_reason():
    setting = Setting(model="nano-4b", layers=99, batch=1, method="eager")
    outcomes = run_group([Task(setting=setting)], Path(os.devnull), time.monotonic() + 300, 300.0)
    assert outcomes == [(None, "ValueError: layers must lie in 1..42, got 99.")]


def test_compilations_are_those_of_the_first_whole_model_with_a_cache_of_their_own(tiny, monkeypatch):
    def pair(**fields):
        return [Task(setting=Setting(method=method, **tiny | fields)) for method in ("eager", "replay")]

    cut, first, second = pair(layers=1), pair(), pair(batch=7)
    again = [[Task(setting=task.setting, compile_only=True) for task in first]]
    assert e2e_decode_speedup.compilations([cut, first, second]) == again
    assert e2e_decode_speedup.compilations([cut, *([task] for task in first)]) == again
    assert e2e_decode_speedup.compilations([cut]) == []
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "before")
    with e2e_decode_speedup.empty_compilation_cache():
        assert not list(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).iterdir())
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "before"
    assert "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ


def record(**fields):
    plain = {"buffer_length": 16, "phases": "random", "state": "fp32"}
    sizes = {"shape": "tiny", "layers": 2, "batch": 8, "context": 20}
    return sizes | plain | {"op": "decode", "floor_us": 4.0} | fields


def test_ratios_compare_equal_batches_and_windows():
    records = [
        record(method="replay", window=4, tokens_per_second=6.0, bounds={"conventional": 3.5, "eager": 2.25}),
        record(method="conventional", window=4, tokens_per_second=2.0),
        record(method="eager", window=1, tokens_per_second=3.0),
        record(method="conventional", window=4, tokens_per_second=1.0, batch=9),
        *(
            record(method=method, window=4, op="concurrency", rows=rows, max_length=length, memory_bytes=9)
            for method, length, rows in (("replay", 64, 30), ("conventional", 64, 12), ("replay", 32, 40))
        ),
    ]
    lines = e2e_spec_decode_throughput.ratios(records).splitlines()
    assert lines[1].split() == ["tiny", "2", "8", "4", "3.00", "(3.50)", "2.00", "(2.25)", "-"]
    assert lines[2:] == ["rows of 64 positions that fit, T = 4, replay over conventional: 2.50"]


def test_speedups_compare_equal_batches_and_contexts():
    records = [
        record(method="eager", time_us=10.0),
        record(method="replay", time_us=5.0),
        record(method="replay", time_us=1.0, context=40),
        {"method": "replay", "op": "compile", "compile_s": 3.0},
    ]
    lines = e2e_decode_speedup.speedups(records).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["tiny", "2", "8", "20", "16", "random", "fp32", "10", "5", "2.000", "40.0", "%/80.0", "%"]
    ]


def test_kernels_of_a_trace_are_summed_by_name(tmp_path):
    names = {1: "fusion_12", 2: "fusion_3", 3: "replay_window"}
    metadata = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }} ' for i, n in names.items()
    )
    events = "".join(f"events {{ metadata_id: {i} duration_ps: {i * 1_000_000} }} " for i in (1, 2, 3, 3))
    line = f'lines {{ id: 1 name: "Stream #7(Compute)" {events} }}'
    other = f'lines {{ id: 2 name: "XLA Ops" {events} }}'
    space = f'planes {{ id: 1 name: "/device:GPU:0" {line} {other} {metadata} }}'
    (tmp_path / "a.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(space))
    times = kernel_times(tmp_path)
    assert times == {"fusion": (2, 3.0), "replay_window": (2, 6.0)}
    assert re.search(r"1\.0 +3\.0  replay_window\n", table(times, steps=2))
    kinds = by_kind(kernel_table.events(tmp_path), steps=2)
    assert {kind: us for kind, us in kinds.items() if us} == {"state and ring": 3.0, "other kernels": 1.5}


def test_time_between_kernels_is_when_none_runs():
    kernels = [
        Event("nvjet_a", 10.0, 5.0),
        Event("decode_attention", 12.0, 2.0),
        Event("replay_flush", 19.0, 1.0),
    ]
    kinds = {kind: us for kind, us in by_kind(kernels, steps=1).items() if us}
    assert kinds == {"products": 5.0, "attention": 2.0, "state and ring": 1.0, "between kernels": 4.0}


def test_variants_change_one_thing_of_the_first(tiny):
    base = Setting(method="replay", **tiny)
    made = e2e_decode_speedup.replays(base, [16, 8], ["random", "spread"], ["fp32", "bf16", "nvfp4:fp32"])
    changed = [
        {"buffer_length": 8},
        {"phases": "spread"},
        {"read": "bf16", "recurrence": "bf16"},
        {"read": "nvfp4"},
    ]
    assert made == [base, *(dataclasses.replace(base, **fields) for fields in changed)]
    (group,) = e2e_decode_speedup.groups([made], 1e12)
    assert [task.setting.method for task in group] == ["eager", *["replay"] * 5]
    assert len(e2e_decode_speedup.groups([made], 1.0)) == 6
