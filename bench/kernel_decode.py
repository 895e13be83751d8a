"""Decode kernels of one layer on a GPU, ours and other projects', at the true flush rate and against the byte
floor.

Times are of the kernels alone (CUPTI), with a cold L2 cache, buffers updated in place; medians with the 10th
and 90th percentile. The row plan of a step (a few small XLA kernels, shared by all layers) is not counted.
Records follow the timing schema of the result files, with `launch` (launch parameters, for peers the fastest
of a sweep at that batch) and for peers `error` (largest RMS ratio to a float64 loop). `phases` is `random`
when rows are spread evenly over the cycle between flushes, `synchronised` when all rows are at the same point
of it; `decode` and `verify` are means over a whole cycle. Several tokens a step: each step commits 1 to T of
them, every count equally often.

    python -m bench.kernel_decode [--shapes super,q122] [--batches 256] [--only WORDS]
        [--peers DIR] [--workers 8] [--time-limit SECONDS] [--out PATH]
"""

import argparse
import itertools
import multiprocessing
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import peers, result_file, timing
from bench.kernel_cases import BATCHES, MAIN, Case, cases

# A kernel that never ends must not keep the device: the signal ends its process, and with it the lock.
MEASURE_SECONDS = 30


def prepare(case: Case, options: argparse.Namespace) -> Any:
    """The case with everything done that needs no device: `measure()` times it, `check()` then raises on
    wrong results."""
    if case.method.startswith("peer:"):
        from bench.peers.layer import PeerLayer

        return PeerLayer(case, options.repeats, options.peers)
    from bench.kernel_layer import OwnLayer

    return OwnLayer(case, options.repeats)


def worker(tasks: Any, results: Any, options: argparse.Namespace, deadline: float) -> None:
    """Takes cases until none is left: prepares each at will, measures it while holding the device lock; all
    of them later where timing has to wait for a file."""
    prepared, start = [], options.start_file
    while True:
        try:
            case = tasks.get_nowait()
        except queue.Empty:
            break
        begun = time.monotonic()
        layer = attempt(case, results, options, deadline, lambda case=case: prepare(case, options))
        if layer is None:
            continue
        prepared.append((case, layer, time.monotonic() - begun))
        del layer
        if start is None:
            finish(prepared.pop(), results, options, deadline)
    if start is not None:
        print(f"prepared {len(prepared)} cases", flush=True)
    while prepared:
        if start is not None and not start.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        finish(prepared.pop(0), results, options, deadline)


def attempt(
    case: Case, results: Any, options: argparse.Namespace, deadline: float, run: Callable[[], Any]
) -> Any:
    """run(), or None and the reason in `results`: one failing case must not lose the others' results."""
    try:
        if time.monotonic() > deadline:
            raise TimeoutError("time limit")
        return run()
    except TimeoutError as error:
        results.put((case, str(error), None))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        results.put((case, reason, None))
        if options.verbose:
            traceback.print_exc()
    return None


def finish(
    prepared: tuple[Case, Any, float], results: Any, options: argparse.Namespace, deadline: float
) -> None:
    """Measures and checks a prepared case, given with its layer and the seconds of its preparation."""
    case, layer, spent = prepared

    def measure() -> list[dict]:
        clock = [time.monotonic()]
        with timing.exclusive(options.lock):
            clock.append(time.monotonic())
            if clock[-1] > deadline:
                raise TimeoutError(f"time limit after {spent:.0f} s")
            signal.alarm(MEASURE_SECONDS)
            try:
                records = layer.measure()
            finally:
                signal.alarm(0)
        clock.append(time.monotonic())
        layer.check()
        waited, measured = (f"{b - a:.1f} s" for a, b in itertools.pairwise(clock))
        results.put((case, f"prepared {spent:.1f} s, waited {waited}, measured {measured}", records))
        return records

    attempt(case, results, options, deadline, measure)


def table(records: list[dict]) -> str:
    """The records as lines of text, with the ratio to the floor."""
    names = ("shape", "batch", "method", "op", "phases", "state", "T", "L", "us", "/floor", "launch")
    lines = ["{:12} {:>5} {:18} {:8} {:12} {:5} {:>2} {:>2} {:>8} {:>7} {}".format(*names)]
    for r in records:
        ratio = r["time_us"] / r["floor_us"]
        launch = " ".join(str(value) for value in (r.get("launch") or {}).values())
        lines.append(
            f"{r['shape']:12} {r['batch']:5} {r['method']:18} {r['op']:8} {r['phases']:12} {r['state']:5} "
            f"{r['window']:2} {r['buffer_length']:2} {r['time_us']:8.1f} {ratio:7.3f} {launch}"
        )
    return "\n".join(lines)


def run(listed: list[Case], options: argparse.Namespace, result: dict) -> None:
    """Measures the cases in worker processes; the result file is rewritten after every case."""
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for case in listed:
        tasks.put(case)
    deadline = time.monotonic() + options.time_limit
    workers = [
        context.Process(target=worker, args=(tasks, results, options, deadline), daemon=True)
        for _ in range(options.workers)
    ]
    for process in workers:
        process.start()
    left = dict.fromkeys(listed, "not reached")
    while left and (any(process.is_alive() for process in workers) or not results.empty()):
        try:
            case, note, records = results.get(timeout=1.0)
        except queue.Empty:
            if time.monotonic() > deadline + 5.0:
                break
            continue
        if records is None:
            left[case] = note
        else:
            del left[case]
            result["records"] += records
        print(f"{case}: {note}", flush=True)
        result["left_out"] = {str(case): reason for case, reason in left.items()}
        result_file.write(result, options.out)
        if all(reason != "not reached" for reason in left.values()):
            break
    for process in workers:
        process.join(timeout=2.0)
        process.terminate()


def parser(documentation: str, out: Path) -> argparse.ArgumentParser:
    """Options of a kernel benchmark."""
    made = argparse.ArgumentParser(description=documentation.splitlines()[0])
    result_file.add_commit(made)
    made.add_argument("--shapes", default=",".join((*MAIN, "qwen3.5-27b")), help="names of bench/shapes.py")
    made.add_argument("--repeats", type=int, default=20)
    made.add_argument("--workers", type=int, default=1, help="processes that trace and compile")
    made.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds; what is left out is listed"
    )
    lock = Path(tempfile.gettempdir()) / "kernel_decode.lock"
    made.add_argument("--lock", type=Path, default=lock, help="file that is locked while the device is timed")
    made.add_argument(
        "--start-file", type=Path, help="prepare all cases first; time them once this file exists"
    )
    made.add_argument("--out", type=Path, default=out)
    made.add_argument("--verbose", action="store_true", help="print the traceback of a failing case")
    return made


def main() -> None:
    """Command line; prints a table last and writes the result file."""
    options = parser(__doc__ or "", result_file.RESULTS / "kernel_decode.json")
    options.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options.add_argument("--only", default="", help="words; a case is kept when its text has one of them")
    options.add_argument(
        "--peers", type=Path, help="folder of the peers' kernels, see bench/peers/loading.py"
    )
    options = options.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    listed = cases(options.shapes.split(","), batches, options.peers is not None)
    words = [word for word in options.only.split(",") if word]
    listed = [case for case in listed if not words or any(word in f" {case} " for word in words)]
    result = result_file.head("bench.kernel_decode", options.commit) | {"left_out": {}, "records": []}
    if options.peers:
        result["versions"] |= peers.versions(options.peers)
    run(listed, options, result)
    print(table(result["records"]))
    for case, reason in result["left_out"].items():
        print(f"left out: {case}: {reason}")


if __name__ == "__main__":
    main()
