"""The choice of launch parameters from a small synthetic sweep, and the table in the package."""

import dataclasses

from bench import kernel_sweep
from pallas_kernels import launch, launch_table
from pallas_kernels.launch import LaunchParameters

ONE, TWO, WIDE = LaunchParameters(132, 4, beside=1), LaunchParameters(132, 4), LaunchParameters(264, 2)


def swept(times, shape="super", **fields):
    return [
        {
            "shape": shape, "op": "decode", "phases": "random", "state": "fp32", "window": 1,
            "time_us": time, "launch": dataclasses.asdict(parameters),
        } | fields
        for parameters, time in times.items()
    ]  # fmt: skip


def test_combinations_are_distinct_and_cover_both_grids_with_and_without_a_flush_beside():
    tried = kernel_sweep.combinations()
    assert len(set(tried)) == len(tried)
    assert {(one.ctas, one.beside) for one in tried} == {(132, 0), (264, 0), (132, 1)}


def test_combinations_for_copies_in_codes_are_distinct_and_left_out_of_the_table():
    tried = kernel_sweep.coded_combinations()
    assert len(set(tried)) == len(tried)
    assert not kernel_sweep.choose(swept({tried[0]: 1.0}, state="nvfp4"))


def test_fastest_names_what_differs_from_the_defaults():
    line = kernel_sweep.fastest(swept({TWO: 280.0, ONE: 270.0}))
    assert line == "super T 1 fp32: 270.0 ctas=132 stages=4 beside=1; 280.0 ctas=132 stages=4"


def test_an_entry_is_never_much_slower_than_a_shape_s_fastest():
    records = swept({ONE: 100.0, TWO: 104.0, WIDE: 103.0}) + swept({ONE: 120.0, TWO: 100.0}, "nano-4b")
    records += swept({WIDE: 9.0}, "q122", window=4, op="verify", state="bf16")
    records += swept({WIDE: 1.0, TWO: 2.0}, phases="synchronised")
    chosen = kernel_sweep.choose(records)
    assert chosen == {"gated_delta": {(2, 8): WIDE}, "mamba2": {(4, 8): TWO}}
    known = {"chip": {"mamba2": {(2, 8): {"ctas": 7, "stages": 1}}}, "other": {}}
    space: dict = {}
    exec(kernel_sweep.table("chip", chosen, known), space)
    assert LaunchParameters(**space["TABLE"]["chip"]["mamba2"][4, 8]) == TWO
    assert LaunchParameters(**space["TABLE"]["chip"]["mamba2"][2, 8]) == LaunchParameters(7, 1)
    assert space["TABLE"]["other"] == {}


def test_of_equals_the_one_with_most_ctas_is_taken():
    assert kernel_sweep.choose(swept({ONE: 100.0, WIDE: 100.4})) == {"mamba2": {(4, 8): WIDE}}
    assert kernel_sweep.choose(swept({ONE: 100.0, WIDE: 100.6})) == {"mamba2": {(4, 8): ONE}}


def test_a_window_is_served_by_the_smallest_entry_that_covers_it():
    records = swept({ONE: 1.0}) + swept({WIDE: 1.0}, window=4, op="verify")
    assert kernel_sweep.choose(records) == {"mamba2": {(4, 1): ONE, (4, 8): WIDE}}


def test_the_package_has_the_table_of_the_committed_sweeps():
    text = kernel_sweep.table(*kernel_sweep.of_results(), launch_table.TABLE)
    assert kernel_sweep.TABLE.read_text() == text


def test_a_device_without_a_table_takes_the_default_s():
    known = launch.step_parameters("NVIDIA H200", "mamba2", 3)
    assert (
        launch.step_parameters("another", "mamba2", 3) == known == launch.step_parameters(None, "mamba2", 8)
    )
