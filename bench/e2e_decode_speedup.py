"""Decode steps of a published model, replay against eager, one token a step.

Random bfloat16 weights, greedy decoding of `--new-tokens` tokens after prompts of `--contexts` tokens, end of
sequence ignored. Eager and replay run in processes of their own, compile once each and take turns repeat by
repeat (where the memory does not hold both, one after the other; `interleaved` in the record tells). The
prompts' keys and values are zeros: only their number matters to the time. Batches of `--full-batches` take
the whole model, those of `--batches` a depth cut, marked so. Replay runs with the first value of
`--buffer-lengths`, `--phases` and `--formats` (what its outputs read, or that and the checkpoint's format as
READ:RECURRENCE); every further value changes that one thing.

With `--compile-times` nothing is decoded: records of the operation `compile` have the times of both methods'
steps of the first whole model, from an empty persistent cache and, `cached`, from the one that this filled.

    python -m bench.e2e_decode_speedup --model nano-4b --batch-size 256
"""

import contextlib
import dataclasses
import operator
import os
import tempfile
from collections.abc import Iterator

from bench import model_options
from bench.decode_loop import PHASES, Setting
from bench.processes import Task, in_turns, run_all

METHODS = ("eager", "replay")


def groups(variants: list[list[Setting]], memory: float) -> list[list[Task]]:
    """Tasks that take turns, eager and all variants of replay at a place, or that do not where `memory` is
    too small for all of them."""
    result = []
    for settings in variants:
        eager = dataclasses.replace(settings[0], method="eager", recurrence="fp32", read="fp32")
        result += in_turns([Task(setting=setting) for setting in (eager, *settings)], memory)
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
        shares = "/".join(f"{100 * one['floor_us'] / one['time_us']:.1f} %" for one in (eager, replay))
        shape, layers, batch, context = size(replay)
        lines.append(
            f"{shape:11}{layers:7}{batch:6}{context:8}{replay['buffer_length']:4} {replay['phases']:13}"
            f"{replay['state']:9}{eager['time_us']:10.0f}{replay['time_us']:10.0f}"
            f"{eager['time_us'] / replay['time_us']:9.3f}{shares:>14}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the speed-ups last and writes the result file."""
    numbers, words = model_options.numbers, model_options.words
    parser = model_options.parser(__doc__)
    parser.add_argument(
        "--full-batches",
        "--batch-size",
        type=numbers,
        default=[1, 256, 512],
        help="batches of the whole model",
    )
    parser.add_argument("--batches", type=numbers, default=[], help="batches of the depth cut")
    parser.add_argument("--contexts", type=numbers, default=[256], help="tokens of a prompt")
    parser.add_argument("--mixed", type=int, default=0, help="prompts are up to so many tokens longer")
    parser.add_argument("--new-tokens", type=int, default=128, help="a repeat, in whole dispatches")
    parser.add_argument("--buffer-lengths", type=numbers, default=[16])
    parser.add_argument("--formats", type=words, default=["fp32"], help="of replay's states")
    parser.add_argument("--phases", type=words, default=["random"], help=f"some of {', '.join(PHASES)}")
    parser.add_argument("--profile", action="store_true", help="one more dispatch, summed by kind of kernel")
    parser.add_argument(
        "--compile-times", action="store_true", help="and nothing else, without a cache and with"
    )
    options = parser.parse_args()
    save, limits = model_options.results("e2e_decode_speedup", options)
    variants = [
        replays(
            Setting(
                model=options.model,
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
            (model_options.cut(options), options.batches),
        )
        for batch in batches
        for context in options.contexts
    ]
    pairs = groups(variants, options.memory * 1e9)
    if options.compile_times:
        measured = []
        with empty_compilation_cache():
            for cached in (False, True):
                records, _ = run_all(compilations(pairs), save=lambda *_: None, **limits)
                measured += [record | {"cached": cached} for record in records]
        save(measured, [])
        return
    records, _ = run_all(pairs, save=save, **limits)
    print(speedups(records))


if __name__ == "__main__":
    main()
