"""Tables of heads that have forgotten, of records of both benchmarks."""

from bench import forgotten_report


def counted(length: int, share: float) -> dict:
    shares = dict.fromkeys((*forgotten_report.SHARES, *forgotten_report.WRITES), share)
    errors = {"error_bfloat16": 1e-6, "worst_bfloat16": 0.25, "worst_write_bounded": 1e-9}
    record = {"source": "trained", "model": "m", "text": "play", "buffer_length": length}
    return record | shares | {"write_ideal": 2 * share} | errors


def test_a_line_has_both_lengths_and_their_errors():
    made = forgotten_report.tables([counted(16, 0.1), counted(32, 0.25)], [])
    assert list(made) == ["forgotten-heads"]
    line = made["forgotten-heads"].splitlines()[2]
    assert line.startswith("| `m` | trained, play | 10.0 / 25.0 | ")
    assert line.endswith("| 20.0 / 50.0 | 1.0e-06 / 1.0e-06 | 2.5e-01 / 2.5e-01 | 1.0e-09 / 1.0e-09 |")


def test_layers_and_models_have_lines_of_their_own():
    same = {"shape": "super", "batch": 256}
    records = [same | {"skip": skip, "forgotten": 0.5, "time_us": 300.4} for skip in ("off", "exact")]
    records += [same | {"skip": "bounded", "layers": 11, "time_us": 2000.0}]
    made = forgotten_report.tables([], records)
    assert made["forgotten-reads"].splitlines()[2:] == [
        "| `super`, one layer | 50 % forget | 256 | 300 | 300 | - |",
        "| `super`, 11 layers | as initialised | 256 | - | - | 2,000 |",
    ]
