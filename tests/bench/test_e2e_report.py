"""Tables and plot of whole models from small synthetic results."""

import json

import pytest

from bench import e2e_report, e2e_transformers, kernel_table, plots

WHOLE = {"shape": "nano-4b", "layers": 42, "depth_cut": False}


KERNELS = dict.fromkeys((*kernel_table.KINDS, kernel_table.OTHER, kernel_table.BETWEEN), 0.0)
KERNELS |= {"state and ring": 4000.0, "products": 3000.0, "other kernels": 500.0, "between kernels": 200.0}


def record(method, time, batch=256, context=288, **fields):
    return WHOLE | {
        "batch": batch, "method": method, "op": "decode", "context": context, "phases": "random",
        "state": "fp32", "recurrence": "fp32", "buffer_length": 16, "time_us": time,
        "window": 1, "accepted": 1.0,
        # Floors are those of the sizes; what a record says depends on its date.
        "floor_us": 1.0, "floor_parts_us": dict.fromkeys(plots.PARTS, 0.0),
        "tokens_per_second": batch / time * 1e6,
        "lowering_s": 4.0, "compile_s": 16.0,
    } | fields  # fmt: skip


RECORDS = [
    record("eager", 15000.0),
    record("replay", 10000.0, kernels_us=KERNELS),
    record("replay", 12000.0, buffer_length=32),
    record("replay", 12500.0, buffer_length=8),
    record("replay", 11000.0, phases="synchronised"),
    record("replay", 7500.0, state="nvfp4"),
    record("eager", 4000.0, batch=1),
    record("replay", 4100.0, batch=1),
    record("replay", 30000.0, batch=512),
    record("eager", 1000.0, batch=64, layers=10, depth_cut=True),
    record("replay", 800.0, batch=64, layers=10, depth_cut=True),
    record("eager", 2000.0, batch=64, layers=10, depth_cut=True, context=1056),
    record("replay", 1800.0, batch=64, layers=10, depth_cut=True, context=1056),
    record("eager", 5000.0, batch=64, layers=10, depth_cut=True, context=4128),
    record("replay", 4800.0, batch=64, layers=10, depth_cut=True, context=4128),
    *(
        record("replay", 1.0, op="compile", compile_s=seconds, cached=cached)
        for cached, seconds in ((False, 16.0), (True, 2.0))
    ),
]  # fmt: skip


def generated(method, rate, decode):
    return {
        "shape": "qwen3.5-4b", "layers": 32, "depth_cut": False, "prompt_tokens": 16, "batch": 1,
        "method": method, "op": "generate", "new_tokens": 64, "tokens_per_second": rate,
        "decode_tokens_per_second": decode,
    }  # fmt: skip


@pytest.fixture
def files(tmp_path):
    contents = {
        "bench.e2e_decode_speedup": RECORDS,
        "bench.e2e_transformers": [
            generated("generate", 200.0, 250.0),
            generated("peer:transformers", 20.0, 20.0),
        ],
        "bench.other": [{}],
    }
    for name, records in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"bench": name, "records": records}))
    return sorted(tmp_path.iterdir())


def test_tables_pair_the_methods(files):
    steps, contexts, variants, kinds, compiled, generation = (
        table.splitlines()[2:] for table in e2e_report.tables(files).values()
    )
    assert steps[1:] == [
        "| Nemotron-3-Nano-4B | 42 | 256 | 288 | 15.00 | 10.00 | 1.50 | 25,600 "
        "| 84.7 % | 80.0 % | 81.8 % | 75.6 % |"
    ]
    assert len(contexts) == 3
    assert contexts[0].startswith("| Nemotron-3-Nano-4B | 10 (cut) | 64 | 288 | 2 % | 1.00 | 0.80 | 1.25 |")
    assert [line.split(" | ")[3:9] for line in variants] == [
        ["random", "fp32", "16", "15.00", "10.00", "1.50"],
        ["random", "fp32", "8", "15.00", "12.50", "1.20"],
        ["random", "fp32", "32", "15.00", "12.00", "1.25"],
        ["synchronised", "fp32", "16", "15.00", "11.00", "1.36"],
        ["random", "nvfp4 of fp32", "16", "15.00", "7.50", "2.00"],
    ]
    assert kinds == [
        "| Nemotron-3-Nano-4B | 42 | 256 | replay | 4.00 (5.14) | 3.00 (2.28) "
        "| 0.00 (0.26) | 0.00 | 0.50 | 0.20 |"
    ]
    assert compiled == ["| Nemotron-3-Nano-4B | replay | 256 | 20 | 6 |"]
    assert generation == ["| Qwen3.5-4B | 32 | 1 | 64 | 200 | 20 | 10.0 | 12.5 |"]


def test_verification_compares_tokens_a_second():
    common = {"shape": "nano-4b", "layers": 42, "depth_cut": False, "batch": 8, "buffer_length": 16}
    common |= {"op": "verify", "commit": "a"}
    eager = common | {"method": "eager", "window": 1, "time_us": 2000.0, "tokens_per_second": 10.0}
    replay = common | {"method": "replay", "window": 4, "time_us": 3000.0, "tokens_per_second": 15.0}
    cut = {"layers": 10, "depth_cut": True}
    records = [
        eager,
        replay,
        replay | {"time_us": 1.0, "buffer_length": 32},
        common | {"op": "concurrency", "method": "conventional", "window": 4, "rows": 3},
        # Another commit's step is compared with none of these.
        replay | {"commit": "b", "method": "conventional"},
        # A cut stands for a model that has no records of its whole.
        replay | cut,
        replay | cut | {"shape": "super", "bounds": {"conventional": 2.1234, "eager": 1.5}},
    ]
    assert e2e_report.verification(records).splitlines()[2:] == [
        "| Nemotron-3-Nano-4B | 42 | 8 | 2.0 | - | 3.0 | - | 1.50 | - | a |",
        "| Nemotron-3-Nano-4B | 42 | 8 | - | - | - | 3.0 | - | - | b |",
        "| Nemotron-3-Super* | 10 (cut) | 8 | - | - | 3.0 | - | - (1.50) | - (2.12) | a |",
    ]


def test_windows_of_cuts_by_tokens_and_batch():
    common = {"shape": "nano-4b", "layers": 10, "depth_cut": True, "buffer_length": 16, "op": "verify"}
    common |= {"file": "grid", "commit": "a", "batch": 8, "window": 2, "peak_bytes": 3e9}
    replay = common | {"method": "replay", "time_us": 1500.0, "tokens_per_second": 30.0}
    conventional = common | {"method": "conventional", "time_us": 2500.0, "tokens_per_second": 20.0}
    records = [
        replay | {"bounds": {"conventional": 1.75, "eager": 4.0}},
        conventional,
        common | {"method": "eager", "window": 1, "tokens_per_second": 10.0},
        replay | {"drafter": "mtp", "tokens_per_second": 1.0},
        replay | {"window": 4},
        conventional | {"window": 4, "file": "another"},
        replay | {"batch": 4},
        conventional | {"batch": 4},
        conventional | {"depth_cut": False, "layers": 42},
    ]
    assert e2e_report.verification_grid(records).splitlines()[2:] == [
        "| Nemotron-3-Nano-4B | 10 (cut) | 2 | 4 | 1.50 | 2.50 | 1.50 | - | 3.0 | 3.0 | a |",
        "| Nemotron-3-Nano-4B | 10 (cut) | 2 | 8 | 1.50 | 2.50 | 1.50 (1.75) | 3.00 (4.00) | 3.0 | 3.0 | a |",
    ]


def test_verified_windows_by_kind_of_kernel():
    replay = record("replay", 10400.0, kernels_us=KERNELS, window=4, accepted=3.0, commit="a")
    assert e2e_report.verification_by_kind([replay, record("eager", 1.0)]).splitlines()[2:] == [
        "| Nemotron-3-Nano-4B | 42 | 256 | replay | 4 | 10.4 | 4.00 (5.98) | 3.00 (9.13) "
        "| 0.00 (0.27) | 0.00 | 0.50 | 0.20 | a |"
    ]


def test_real_drafts_by_device():
    drafted = {"model": "tiny", "batch": 2, "method": "replay", "drafter": "mtp", "window": 4, "equal": 1}
    drafted |= {"tokens_per_second": 1234.5, "step_us": 2500.0, "committed": 2.625}
    records = [
        drafted | {"on": "gpu NVIDIA H200, 1 device(s)"},
        drafted | {"on": "cpu x86_64, 1 device(s)", "drafter": None, "window": 1},
    ]
    assert e2e_report.real_drafts(records).splitlines()[2:] == [
        "| x86_64 | `tiny` | 2 | replay | - | 1 | 1,234 | 2.50 | 2.62 | 1 of 2 |",
        "| H200 | `tiny` | 2 | replay | mtp | 4 | 1,234 | 2.50 | 2.62 | 1 of 2 |",
    ]


def test_rows_that_fit_are_compared_at_equal_lengths():
    common = {"shape": "nano-4b", "op": "concurrency", "window": 4, "memory_bytes": 10**11, "commit": "a"}
    records = [
        common | {"method": method, "max_length": length, "rows": rows}
        for method, length, rows in (
            ("replay", 2048, 30),
            ("conventional", 512, 7),
            ("conventional", 2048, 12),
        )
    ]
    assert e2e_report.concurrency(records).splitlines()[2:] == [
        "| Nemotron-3-Nano-4B | 2,048 | 100 | 30 | 12 | 2.50 | a |"
    ]


def test_curves_of_whole_models():
    assert plots.by_batch(RECORDS) == {
        ("nano-4b", False): ([1, 256], [4000 / 4100, 1.5]),
        ("nano-4b", True): ([64], [1.25]),
    }
    assert plots.by_context(RECORDS) == {
        ("nano-4b", 64, "eager"): ([288, 1056, 4128], [1.0, 2.0, 5.0]),
        ("nano-4b", 64, "replay"): ([288, 1056, 4128], [0.8, 1.8, 4.8]),
    }


def test_the_plot_of_whole_models_is_the_same_twice(tmp_path):
    pytest.importorskip("matplotlib", reason="only benchmarks draw")
    drawn = []
    for _ in range(2):
        plots.whole_models(RECORDS, tmp_path / "whole.svg")
        drawn.append((tmp_path / "whole.svg").read_text())
    assert drawn[0] == drawn[1]
    assert "measured" in drawn[0]


def test_generation_is_split_into_prompts_and_steps(monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 3.0, 3.0, 13.0])
    monkeypatch.setattr(e2e_transformers.time, "perf_counter", lambda: next(clock))
    calls = []
    (made,) = e2e_transformers.records({"generate": calls.append}, 4, 11, 1)
    assert calls == [11, 1, 11]
    assert (made["seconds"], made["first_token_s"], made["tokens_per_second"]) == (10.0, 2.0, 4.4)
    assert (made["decode_us"], made["decode_tokens_per_second"]) == (800_000.0, 5.0)


def test_steps_one_by_one():
    def timed(method, phases, **fields):
        times = {"median": 1000.0, "p99": 1049.6, "max": 1200.0, "mean": 1024.0, "p99_of_all": 1390.0}
        single = {"step_us": times, "step_times_us": [1000.0] * 128}
        return record(method, 1.0, batch=64, phases=phases, commit="a", **single, **fields)

    records = [
        timed("eager", "random"),
        timed("replay", "spread"),
        timed("replay", "synchronised", shape="super", layers=11, depth_cut=True),
        timed("replay", "synchronised"),
    ]
    figures = "128 | 1,000 | 1,050 | 1,024 | 1.050 | 1.390 | 62,500 | a |"
    assert e2e_report.step_times(records).splitlines()[2:] == [
        f"| Nemotron-3-Nano-4B | 42 | 64 | replay | synchronised | {figures}",
        f"| Nemotron-3-Nano-4B | 42 | 64 | replay | spread | {figures}",
        f"| Nemotron-3-Nano-4B | 42 | 64 | eager | - | {figures}",
        f"| Nemotron-3-Super* | 11 (cut) | 64 | replay | synchronised | {figures}",
    ]
