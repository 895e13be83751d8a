"""Where a profiled dispatch spends its time: kernels of a JAX trace, summed by name or by kind.

python -m bench.kernel_table FOLDER [--steps 16]
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

# Kinds of kernels by what their names begin with or contain; all others are "other kernels".
KINDS = {
    "state and ring": r"replay_|eager_step|conventional",
    "products": r"nvjet|gemm|cublas|cutlass|splitK|few_rows",
    "attention": r"attention",
    "convolution and norms": r"convolution|_norm",
}
OTHER, BETWEEN = "other kernels", "between kernels"


class Event(NamedTuple):
    """A kernel's name and its times in microseconds."""

    name: str
    start: float
    duration: float


def events(folder: Path) -> list[Event]:
    """The GPU kernels in a folder's newest trace, in the order in which they started."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found = [
        Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
        for plane in ProfileData.from_file(str(newest)).planes
        if plane.name.startswith("/device:GPU")
        for stream in plane.lines
        if stream.name.startswith("Stream")
        for event in stream.events
    ]
    return sorted(found, key=lambda event: event.start)


def kernel_times(folder: Path) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of the GPU kernels in a folder's newest trace, by name without numbers."""
    totals: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for event in events(folder):
        entry = totals[re.sub(r"[_.]?\d+$", "", re.sub(r"(_\d+)+(?=_|$)", "", event.name))]
        entry[0] += 1
        entry[1] += event.duration
    return {name: (count, us) for name, (count, us) in totals.items()}


def by_kind(found: Sequence[Event], steps: int) -> dict[str, float]:
    """Microseconds a step of every kind of kernel, and of the time between kernels; events in order."""
    totals = dict.fromkeys((*KINDS, OTHER, BETWEEN), 0.0)
    busy_until = found[0].start if found else 0.0
    for event in found:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), OTHER)
        totals[kind] += event.duration
        totals[BETWEEN] += max(event.start - busy_until, 0.0)
        busy_until = max(busy_until, event.start + event.duration)
    return {kind: round(total / steps, 1) for kind, total in totals.items()}


def table(times: dict[str, tuple[int, float]], steps: int, top: int = 25) -> str:
    """Launches and microseconds a step of the kernels that take longest, and of all."""
    lines = [f"{'launches':>9}{'us a step':>11}  kernel"]
    ordered = sorted(times.items(), key=lambda item: -item[1][1])
    for name, (count, us) in ordered[:top]:
        lines.append(f"{count / steps:9.1f}{us / steps:11.1f}  {name[:80]}")
    count, us = (sum(value[i] for value in times.values()) for i in range(2))
    lines.append(f"{count / steps:9.1f}{us / steps:11.1f}  all")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps in the trace")
    parser.add_argument("--top", type=int, default=25)
    options = parser.parse_args()
    print(table(kernel_times(options.folder), options.steps, options.top))


if __name__ == "__main__":
    main()
