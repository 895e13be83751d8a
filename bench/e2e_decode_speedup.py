"""Decode steps of a published model, replay against eager, one token a step.

Random bfloat16 weights, greedy decoding of `--new-tokens` tokens after prompts of `--contexts` tokens, end of
sequence ignored. Eager and replay run in processes of their own, compile once each and take turns repeat by
repeat (where the memory does not hold both, one after the other; `interleaved` in the record tells). The
prompts' keys and values are zeros: only their number matters to the time. Batches of `--full-batches` take
the whole model, those of `--batches` a depth cut, marked so. Replay runs with the first value of
`--buffer-lengths`, `--phases` and `--formats` (what its outputs read, or that and the checkpoint's format as
READ:RECURRENCE); every further value changes that one thing.

With `--compile-times` the step's compilation, which every record has, starts from an empty persistent cache;
records of the operation `compile` then have the times of processes that find the first whole model's there.

    python -m bench.e2e_decode_speedup --model nano-4b --batch-size 256 --commit HASH
"""

import argparse
import contextlib
import dataclasses
import operator
import os
import tempfile
import time
from collections.abc import Iterator

from bench import result_file
from bench.decode_loop import PHASES, Setting, needed_bytes
from bench.e2e_models import CUT_LAYERS, HUB_NAMES, STAND_INS
from bench.processes import Task, add_options, run_all

METHODS = ("eager", "replay")


def groups(variants: list[list[Setting]], memory: float) -> list[list[Task]]:
    """Tasks that take turns, eager and all variants of replay at a place, or that do not where `memory` is
    too small for all of them."""
    result = []
    for settings in variants:
        eager = dataclasses.replace(settings[0], method="eager", recurrence="fp32", read="fp32")
        tasks = [Task(setting=setting) for setting in (eager, *settings)]
        together = sum(needed_bytes(task.setting) for task in tasks) < memory
        result += [tasks] if together else [[task] for task in tasks]
    return result


def replays(base: Setting, lengths: list[int], phases: list[str], formats: list[str]) -> list[Setting]:
    """Replay with the first value of every list, then with every other value in its place."""

    def of(length: int, phase: str, format: str) -> Setting:
        read, _, recurrence = format.partition(":")
        changed = {"buffer_length": length, "phases": phase, "read": read, "recurrence": recurrence or read}
        return dataclasses.replace(base, **changed)

    first = lengths[0], phases[0], formats[0]
    listed = [of(*first), *(of(length, *first[1:]) for length in lengths[1:])]
    listed += [of(first[0], phase, first[2]) for phase in phases[1:]]
    return listed + [of(*first[:2], format) for format in formats[1:]]


@contextlib.contextmanager
def empty_compilation_cache() -> Iterator[None]:
    """While it lasts, processes that start share a persistent compilation cache of their own."""
    with tempfile.TemporaryDirectory() as folder:
        ours = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def compilations(pairs: list[list[Task]]) -> list[list[Task]]:
    """Tasks that compile both methods' steps of the first whole model among the pairs again, side by side."""
    whole = [task for pair in pairs for task in pair if task.setting.layers is None]
    first = [task for task in whole if task.setting.batch == whole[0].setting.batch][: len(METHODS)]
    return [[dataclasses.replace(task, compile_only=True) for task in first]] if first else []


def speedups(records: list[dict]) -> str:
    """Replay over eager, and both over their floors, a line for every replay step."""
    lines = [
        f"{'shape':11}{'layers':>7}{'batch':>6}{'context':>8}{'L':>4} {'phases':13}{'state':9}"
        f"{'eager us':>10}{'replay us':>10}{'speed-up':>9}{'of floor':>14}"
    ]
    size = operator.itemgetter("shape", "layers", "batch", "context")
    decode = [record for record in records if record["op"] == "decode"]
    eagers = {size(record): record for record in decode if record["method"] == "eager"}
    for replay in decode:
        eager = eagers.get(size(replay))
        if eager is None or replay is eager:
            continue
        shares = "/".join(f"{100 * one['floor_us'] / one['time_us']:.0f} %" for one in (eager, replay))
        shape, layers, batch, context = size(replay)
        lines.append(
            f"{shape:11}{layers:7}{batch:6}{context:8}{replay['buffer_length']:4} {replay['phases']:13}"
            f"{replay['state']:9}{eager['time_us']:10.0f}{replay['time_us']:10.0f}"
            f"{eager['time_us'] / replay['time_us']:9.3f}{shares:>14}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the speed-ups last and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in words(text)]

    def words(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser.add_argument("--model", "--model-id", default="nano-4b", choices=(*CUT_LAYERS, *HUB_NAMES))
    parser.add_argument(
        "--full-batches",
        "--batch-size",
        type=numbers,
        default=[1, 256, 512],
        help="batches of the whole model",
    )
    parser.add_argument("--batches", type=numbers, default=[], help="batches of the depth cut")
    parser.add_argument("--layers", type=int, help="layers of the depth cut")
    parser.add_argument("--contexts", type=numbers, default=[256], help="tokens of a prompt")
    parser.add_argument("--mixed", type=int, default=0, help="prompts are up to so many tokens longer")
    parser.add_argument("--new-tokens", type=int, default=128, help="a repeat, in whole dispatches")
    parser.add_argument("--steps", type=int, default=16, help="tokens a dispatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--buffer-lengths", type=numbers, default=[16])
    parser.add_argument("--formats", type=words, default=["fp32"], help="of replay's states")
    parser.add_argument("--phases", type=words, default=["random"], help=f"some of {', '.join(PHASES)}")
    parser.add_argument("--memory", type=float, default=130.0, help="GB for both processes, or one of them")
    parser.add_argument("--jobs", type=int, default=1, help="pairs that compile side by side")
    parser.add_argument("--profile", action="store_true", help="one more dispatch, summed by kind of kernel")
    parser.add_argument("--compile-times", action="store_true", help="with and without the persistent cache")
    add_options(parser)
    options = parser.parse_args()
    # This process only names the device; the memory is its children's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name: str = HUB_NAMES.get(options.model) or options.model
    result = result_file.head("bench.e2e_decode_speedup", options.commit)
    result["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    if name in STAND_INS:
        result["note"] = f"{name}: experts replaced by dense MLPs of the width that a token uses"
    variants = [
        replays(
            Setting(
                model=name,
                layers=layers,
                batch=batch,
                method="replay",
                context=context,
                spread=options.mixed,
                steps=options.steps,
                dispatches=-(-options.new_tokens // options.steps),
                repeats=options.repeats,
                profile=options.profile,
            ),
            options.buffer_lengths,
            options.phases,
            options.formats,
        )
        for layers, batches in (
            (None, options.full_batches),
            (options.layers or CUT_LAYERS[name], options.batches),
        )
        for batch in batches
        for context in options.contexts
    ]
    pairs = groups(variants, options.memory * 1e9)
    out = options.out or result_file.RESULTS / f"e2e_decode_speedup_{name}.json"

    def save(records: list[dict], left_out: list[dict]) -> None:
        result_file.write(result | {"left_out": left_out, "records": records}, out)

    limits = {"memory": options.memory * 1e9, "turn_limit": options.turn_limit, "lock": options.lock}
    cache = empty_compilation_cache() if options.compile_times else contextlib.nullcontext()
    began = time.monotonic()
    with cache:
        records, left_out = run_all(
            pairs, save=save, jobs=options.jobs, time_limit=options.time_limit, **limits
        )
        if options.compile_times:
            run_all(
                compilations(pairs),
                save=lambda more, lost: save(records + more, left_out + lost),
                jobs=1,
                time_limit=options.time_limit - (time.monotonic() - began),
                **limits,
            )
    print(speedups(records))


if __name__ == "__main__":
    main()
