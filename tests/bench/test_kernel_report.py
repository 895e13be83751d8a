"""Tables and plot from a small synthetic result."""

import pytest

from bench import kernel_report, plots


def record(method, time, batch=256, **fields):
    phases = "random" if "replay" in method else "synchronised"
    return {
        "shape": "super", "batch": batch, "method": method, "op": "decode", "phases": phases,
        "state": "fp32", "recurrence": "fp32", "window": 1, "buffer_length": 16,
        "time_us": time, "floor_us": 250.0,
    } | fields  # fmt: skip


RECORDS = [
    record("replay", 275.0),
    record("replay", 10.0, batch=1),
    record("replay", 290.0, phases="synchronised"),
    record("replay", 310.0, op="nonflush", phases="synchronised", window=4),
    record("replay", 80.0, op="nonflush", phases="synchronised", state="nvfp4"),
    record("replay", 70.0, op="nonflush", phases="synchronised", state="nvfp4", recurrence="fp16"),
    record("replay", 400.0, op="verify", window=4),
    record("peer:authors-replay", 500.0, op="verify", window=4),
    record("eager", 540.0),
    record("eager", 12.0, batch=1),
    record("peer:vllm", 560.0),
    record("peer:mamba-ssm", 550.0),
    record("peer:vllm-replay", 330.0),
    record("peer:vllm-replay", 300.0, state="bf16"),
]


def test_headline_takes_the_fastest_peer_of_each_kind():
    line = kernel_report.headline(RECORDS).split("\n")[2]
    assert line == "| `super` | 550 (mamba-ssm) | 540 | 330 (vllm) | 275 | 1.10 | 2.00 | 1.20 |"


def test_ratios_by_batch_are_over_our_eager_kernel():
    assert kernel_report.by_batch(RECORDS).split("\n")[2] == "| `super` | 1.20 | 1.96 |"


def test_few_rows_have_the_time_of_the_faster_method_over_that_of_the_chosen_one():
    line = kernel_report.few_rows(RECORDS).split("\n")[2]
    # Eager takes 12 us there and replay 10, but rows are few.
    assert line == "| `super` | eager 0.83 | - | - | - | - |"


def test_every_kernel_has_a_line():
    assert kernel_report.by_peer(RECORDS).split("\n")[2:] == [
        "| eager | ours | 540 | - | - | - |",
        "| eager | vllm | 560 | - | - | - |",
        "| eager | mamba-ssm | 550 | - | - | - |",
        "| replay | ours | 275 | - | - | - |",
        "| replay | vllm | 330 | - | - | - |",
    ]


def test_formats_and_windows_are_steps_without_a_flush():
    header, _, line = kernel_report.by_format(RECORDS).split("\n")
    assert header == "| shape | T = 4, fp32 | T = 1, nvfp4 |"
    assert line == "| `super` | 310 | 80 |"


def test_windows_are_steps_at_the_true_flush_rate():
    line = kernel_report.by_window(RECORDS).split("\n")[2]
    assert line == "| `super` | - | 400 | - | 500 (authors) | 1.25 |"


def test_curves_hold_the_batches_that_were_measured():
    lines = plots.curves(RECORDS, "super")
    assert lines["replay, ours"] == ([1, 256], pytest.approx([1.2, 540 / 275]))
    assert lines["eager, fastest peer"] == ([256], pytest.approx([540 / 550]))


def test_plot_is_a_small_file_with_a_panel_a_shape(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    plots.plot([*RECORDS, *(one | {"shape": "q122"} for one in RECORDS)], path)
    text = path.read_text()
    assert ">super<" in text
    assert ">q122<" in text
    assert len(text) < 100_000
