"""Sums and splits of kernel times, with a recorded CUPTI in place of the real one."""

import pytest

from bench import timing


class Recorded:
    """What CUPTI would report: each started kernel by name with its milliseconds."""

    def __init__(self):
        self.started = []

    def _cupti_init(self):
        self.started = []

    def _cupti_get_timings(self, finalize):
        return self.started


@pytest.fixture
def device(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(timing, "_extension", lambda: recorded)
    return recorded


def clock(device):
    return {
        "cool": lambda: device.started.append(("sum", 9.0)),
        "wait": lambda: None,
        "keep": lambda name: name != "sum",
    }


def test_kernels_of_a_launch_are_summed_without_the_cooling(device):
    def launch(milliseconds):
        device.started += [("flush", milliseconds), ("window", 1.0)]

    launches = [lambda: launch(0.5), lambda: launch(0.25)]
    assert timing.kernel_times(launches, **clock(device)) == [1500.0, 1250.0]


def test_launches_may_start_different_kernels(device):
    launches = [
        lambda: device.started.append(("window", 1.0)),
        lambda: device.started.extend([("precompute", 0.5), ("window", 1.0)]),
    ]
    assert timing.kernel_times(launches, **clock(device)) == [1000.0, 1500.0]


def test_a_launch_without_a_kernel_is_refused(device):
    launches = [lambda: None, lambda: device.started.append(("window", 1.0))]
    with pytest.raises(
        RuntimeError, match=r"2 launches, 1 times of kernels; kernels seen: \['sum', 'window'\]"
    ):
        timing.kernel_times(launches, **clock(device))


def test_fastest_candidate_by_its_least_time(device):
    best, least = timing.fastest(
        [3, 1, 2], lambda c: device.started.append(("window", float(c))), **clock(device)
    )
    assert best == 1
    assert least == {3: 3000.0, 1: 1000.0, 2: 2000.0}


def test_a_candidate_that_does_not_compile_is_dropped(capsys):
    def run(candidate):
        raise ValueError("too much shared memory")

    assert not timing.runs(run, 8)
    assert "too much shared memory" in capsys.readouterr().out
