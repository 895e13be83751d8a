"""Tables of the README and bench/RESULTS.md from a result file of `bench.kernel_decode`, in Markdown.

python -m bench.kernel_report bench/results/kernel_decode.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench.kernel_cases import MAIN
from bench.shapes import SHAPES
from replayssm_jax.backend import eager_is_sooner

EAGER_PEERS = ("peer:vllm", "peer:mamba-ssm", "peer:flashinfer", "peer:fla")
REPLAY_PEERS = ("peer:authors-replay", "peer:vllm-replay", "peer:flashinfer-replay")


def pick(records: list[dict], **fields: object) -> dict | None:
    """The fastest record with these fields, one token, float32 state and L = 16 unless said; None when there
    is none."""
    fields = {"window": 1, "state": "fp32", "buffer_length": 16} | fields
    matching = [r for r in records if all(r[name] == value for name, value in fields.items())]
    return min(matching, key=lambda r: r["time_us"], default=None)


def step(
    records: list[dict], shape: str, batch: int, methods: tuple[str, ...], **fields: object
) -> dict | None:
    """The fastest of the methods for a step at the true flush rate: random phases, or eager."""
    found = []
    for method in methods:
        phase = "random" if "replay" in method else "synchronised"
        found.append(
            pick(records, shape=shape, batch=batch, method=method, op="decode", phases=phase, **fields)
        )
    return min((r for r in found if r), key=lambda r: r["time_us"], default=None)


def rows_of_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def _time(record: dict | None) -> str:
    return f"{record['time_us']:.0f}" if record else "-"


def _named(record: dict | None) -> str:
    return (
        f"{record['time_us']:.0f} ({record['method'].split(':')[-1].removesuffix('-replay')})"
        if record
        else "-"
    )


def _ratio(slow: dict | None, fast: dict | None) -> str:
    return f"{slow['time_us'] / fast['time_us']:.2f}" if slow and fast else "-"


def headline(records: list[dict], batch: int = 256) -> str:
    """Microseconds a token of one layer, ours and the fastest peers."""
    header = ["shape", "eager, fastest peer", "eager, ours", "replay, fastest peer", "replay, ours"]
    header += ["/ floor", "over the eager peer", "over the replay peer"]
    rows = []
    for shape in MAIN:
        find: Callable = lambda *methods, shape=shape: step(records, shape, batch, methods)  # noqa: E731
        peer, own, replay_peer, replay = (
            find(*EAGER_PEERS),
            find("eager"),
            find(*REPLAY_PEERS),
            find("replay"),
        )
        if not replay:
            continue
        floor = f"{replay['time_us'] / replay['floor_us']:.2f}"
        rows.append([f"`{shape}`", _named(peer), _time(own), _named(replay_peer), _time(replay), floor,
                     _ratio(peer, replay), _ratio(replay_peer, replay)])  # fmt: skip
    return rows_of_table(header, rows)


def by_batch(records: list[dict]) -> str:
    """How many times faster than our eager kernel our replay is, by batch."""
    batches = sorted({r["batch"] for r in records})
    rows = []
    for shape in MAIN:
        cells = [
            _ratio(step(records, shape, batch, ("eager",)), step(records, shape, batch, ("replay",)))
            for batch in batches
        ]
        if set(cells) != {"-"}:
            rows.append([f"`{shape}`", *cells])
    return rows_of_table(["shape", *map(str, batches)], rows)


def few_rows(records: list[dict]) -> str:
    """What `auto` takes for few rows, and the time of the faster method over that of the one it takes."""
    batches = [1, 2, 4, 8, 16]
    rows = []
    for shape in MAIN:
        cells = []
        for batch in batches:
            both = {m: step(records, shape, batch, (m,)) for m in ("eager", "replay")}
            taken = "eager" if eager_is_sooner(SHAPES[shape], batch) else "replay"
            times = {method: record["time_us"] for method, record in both.items() if record}
            known = len(times) == len(both)
            cells.append(f"{taken} {min(times.values()) / times[taken]:.2f}" if known else "-")
        if set(cells) != {"-"}:
            rows.append([f"`{shape}`", *cells])
    return rows_of_table(["shape", *map(str, batches)], rows)


def by_peer(records: list[dict], batch: int = 256) -> str:
    """Microseconds a step of one token of every kernel, the flush included."""
    rows = []
    for method in ("eager", *EAGER_PEERS, "replay", *REPLAY_PEERS):
        cells = [_time(step(records, shape, batch, (method,))) for shape in MAIN]
        if set(cells) != {"-"}:
            kind = "replay" if "replay" in method else "eager"
            name = method.removeprefix("peer:").removesuffix("-replay")
            rows.append([kind, "ours" if name == kind else name, *cells])
    return rows_of_table(["method", "kernel", *(f"`{shape}`" for shape in MAIN)], rows)


def by_window(records: list[dict], batch: int = 256) -> str:
    """Microseconds of a step of T tokens at the true flush rate, and the fastest peer's at T = 4."""
    rows = []
    for shape in MAIN:

        def verify(method: str, window: int, shape: str = shape) -> dict | None:
            fields = {"shape": shape, "batch": batch, "op": "verify", "phases": "random"}
            return pick(records, method=method, window=window, **fields)

        ours, peer = {window: verify("replay", window) for window in (2, 4, 8)}, verify(REPLAY_PEERS[0], 4)
        if any(ours.values()):
            rows.append([f"`{shape}`", *map(_time, ours.values()), _named(peer), _ratio(peer, ours[4])])
    return rows_of_table(["shape", "T = 2", "T = 4", "T = 8", "T = 4, peer", "over the peer"], rows)


def by_format(records: list[dict], batch: int = 256) -> str:
    """Microseconds of a step in which no row flushes, by tokens a step and by format of the state that it
    reads; copies of 8 and 4 bits are made of a float32 checkpoint."""
    columns = [(1, "fp32"), (2, "fp32"), (4, "fp32"), (8, "fp32"), (1, "bf16"), (1, "fp16")]
    columns += [(1, "fp8_e4m3"), (1, "nvfp4"), (4, "nvfp4")]

    def time(shape: str, window: int, state: str) -> str:
        fields = {"shape": shape, "batch": batch, "method": "replay", "op": "nonflush"}
        checkpoint = state if state in ("bf16", "fp16") else "fp32"
        return _time(pick(records, **fields, window=window, state=state, recurrence=checkpoint))

    cells = {column: [time(shape, *column) for shape in MAIN] for column in columns}
    known = [column for column in columns if set(cells[column]) != {"-"}]
    rows = [[f"`{shape}`", *(cells[column][i] for column in known)] for i, shape in enumerate(MAIN)]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    return rows_of_table(["shape", *(f"T = {window}, {state}" for window, state in known)], rows)


def tables(records: list[dict]) -> dict[str, str]:
    """The tables of the documents, by name."""
    made = {
        "": headline,
        "-by-peer": by_peer,
        "-by-batch": by_batch,
        "-few-rows": few_rows,
        "-by-window": by_window,
        "-by-format": by_format,
    }
    return {f"kernels{name}": table(records) for name, table in made.items()} if records else {}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    records = json.loads(parser.parse_args().result.read_text())["records"]
    print(*tables(records).values(), sep="\n\n")


if __name__ == "__main__":
    main()
