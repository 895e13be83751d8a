"""The benchmark's loop: failures and time limits cost a case, never the others."""

import argparse
import queue

import pytest

from bench import kernel_decode
from bench.kernel_cases import Case

CASES = [Case(shape="super", batch=batch, method="replay") for batch in (1, 2, 3)]


class Layer:
    """A layer whose second size measures nothing but an error."""

    def __init__(self, case, checked):
        self.case, self.checked = case, checked

    def measure(self):
        if self.case.batch == 2:
            raise RuntimeError("out of tiles")
        return [{"batch": self.case.batch}]

    def check(self):
        self.checked.append(self.case.batch)


@pytest.fixture
def work(monkeypatch, tmp_path):
    checked = []
    monkeypatch.setattr(kernel_decode, "prepare", lambda case, options: Layer(case, checked))

    def go(deadline, start_file=None):
        tasks, results = queue.Queue(), queue.Queue()
        for case in CASES:
            tasks.put(case)
        options = argparse.Namespace(lock=tmp_path / "lock", verbose=False, start_file=start_file)
        kernel_decode.worker(tasks, results, options, deadline)
        return [results.get_nowait() for _ in CASES], checked

    return go


def test_a_failing_case_is_reported_and_the_next_one_runs(work):
    results, checked = work(float("inf"))
    assert [records for _, _, records in results] == [[{"batch": 1}], None, [{"batch": 3}]]
    assert results[1][1] == "RuntimeError: out of tiles"
    assert checked == [1, 3]


def test_cases_after_the_time_limit_are_named(work):
    results, checked = work(0.0)
    assert [(case, note) for case, note, _ in results] == [(case, "time limit") for case in CASES]
    assert not checked


def test_nothing_is_timed_before_the_start_file_exists(work, tmp_path, monkeypatch):
    start, prepared = tmp_path / "start", []
    prepare = kernel_decode.prepare

    def prepare_and_start_last(case, options):
        layer = prepare(case, options)
        assert not layer.checked
        prepared.append(case)
        if len(prepared) == len(CASES):
            start.touch()
        return layer

    monkeypatch.setattr(kernel_decode, "prepare", prepare_and_start_last)
    results, checked = work(float("inf"), start)
    assert {case for case, _, _ in results} == set(CASES) and checked == [1, 3]


def test_table_has_a_line_a_record_with_the_ratio_to_the_floor():
    record = {
        "shape": "super", "batch": 256, "method": "peer:vllm", "op": "decode", "phases": "random",
        "state": "fp32", "window": 1, "buffer_length": 16, "time_us": 300.0, "floor_us": 250.0,
        "launch": {"BLOCK_SIZE_M": 32},
    }  # fmt: skip
    header, line = kernel_decode.table([record]).split("\n")
    assert header.split()[-2:] == ["/floor", "launch"]
    assert line.split() == [
        "super",
        "256",
        "peer:vllm",
        "decode",
        "random",
        "fp32",
        "1",
        "16",
        "300.0",
        "1.200",
        "32",
    ]
