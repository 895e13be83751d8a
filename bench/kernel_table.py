"""Where a profiled dispatch spends its time: kernels of a JAX trace, summed by name.

python -m bench.kernel_table FOLDER [--steps 16]
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

from jax.profiler import ProfileData


def kernel_times(folder: Path) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of the GPU kernels in a folder's newest trace, by name without numbers."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    totals: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for plane in ProfileData.from_file(str(newest)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for stream in plane.lines:
            if not stream.name.startswith("Stream"):
                continue
            for event in stream.events:
                entry = totals[re.sub(r"[_.]?\d+$", "", re.sub(r"(_\d+)+(?=_|$)", "", event.name))]
                entry[0] += 1
                entry[1] += event.duration_ns / 1e3
    return {name: (count, us) for name, (count, us) in totals.items()}


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
