"""Tables of bench/RESULTS.md from result files of `bench.forgotten_heads` and `bench.forgotten_reads`."""

from bench.kernel_report import rows_of_table
from replayssm_jax.config import SKIPS

LENGTHS = 16, 32
SHARES = "exact", "float32", "bfloat16", "ideal_bfloat16"
WRITES = "write_exact", "write_bounded", "write_ideal"


def tables(heads: list[dict], reads: list[dict]) -> dict[str, str]:
    """The tables by name; none without records."""
    made = {"forgotten-heads": (shares, heads), "forgotten-reads": (times, reads)}
    return {name: table(records) for name, (table, records) in made.items() if records}


def shares(records: list[dict]) -> str:
    """Percentages of reads and writes left out at L = 16 and 32, and the errors of the former."""
    header = ["model", "decays", "reads: exact", "2^-25", "2^-9", "at most (2^-9)"]
    header += ["writes: exact", "bounded", "at most"]
    header += ["outputs lose (2^-9)", "worst read, of its output (2^-9)", "worst write, of a row"]
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for record in records:
        text = f"trained, {record['text']}" if record["source"] == "trained" else record["drawn"]
        found.setdefault((record["model"], text), {})[record["buffer_length"]] = record
    rows = []
    for (model, decays), lengths in found.items():
        both = [lengths[length] for length in LENGTHS]
        cells = [" / ".join(f"{100 * one[name]:.1f}" for one in both) for name in (*SHARES, *WRITES)]
        errors = ("error_bfloat16", "worst_bfloat16", "worst_write_bounded")
        cells += [" / ".join(f"{one[name]:.1e}" for one in both) for name in errors]
        rows.append([f"`{model}`", decays, *cells])
    return rows_of_table(header, rows)


def times(records: list[dict]) -> str:
    """Microseconds a step by the way of skipping: layers by the share of heads that forget, and models."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for record in records:
        layer = "forgotten" in record
        what = f"`{record['shape']}`, " + ("one layer" if layer else f"{record['layers']} layers")
        decays = f"{100 * record['forgotten']:.0f} % forget" if layer else "as initialised"
        found.setdefault((what, decays), {})[record["skip"]] = record
    rows = [
        [*key, str(next(iter(ways.values()))["batch"])]
        + [f"{ways[skip]['time_us']:,.0f}" if skip in ways else "-" for skip in SKIPS]
        for key, ways in found.items()
    ]
    return rows_of_table(["what", "heads", "batch", *SKIPS], rows)
