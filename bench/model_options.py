"""What the command lines of the benchmarks of whole models share: options, and the head of their results."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import result_file
from bench.e2e_models import CUT_LAYERS, HUB_NAMES, STAND_INS


def words(text: str) -> list[str]:
    """The parts between commas."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """The integers between commas."""
    return [int(part) for part in words(text)]


def parser(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser that knows the shared options; `defaults` change their defaults."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model",
        "--model-id",
        default="nano-4b",
        type=lambda name: HUB_NAMES.get(name, name),
        choices=CUT_LAYERS,
        help=f"or a name on the hub: {', '.join(HUB_NAMES)}",
    )
    made.add_argument("--layers", type=int, help="layers of the depth cut; 0: the whole model")
    made.add_argument("--steps", type=int, default=16, help="steps a dispatch")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--memory", type=float, default=130.0, help="GB; what needs more is left out")
    made.add_argument("--jobs", type=int, default=1, help="groups that compile side by side")
    made.add_argument("--time-limit", type=float, default=3600.0, help="seconds; what is left out is listed")
    made.add_argument(
        "--turn-limit", type=float, default=120.0, help="seconds of a group on the device, warm-up included"
    )
    made.add_argument("--lock", type=Path, help="file that other users of the device hold in their turn")
    result_file.add_commit(made)
    made.add_argument("--out", type=Path)
    made.set_defaults(**defaults)
    return made


def cut(options: argparse.Namespace) -> int | None:
    """Layers of the depth cut, None for all of them."""
    return CUT_LAYERS[options.model] if options.layers is None else options.layers or None


def results(bench: str, options: argparse.Namespace) -> tuple[Callable[[list, list], None], dict[str, Any]]:
    """What `processes.run_all` is given: the function that writes the result file, and limits.

    bench: a module of this package.
    """
    # This process only names the device; the memory is its children's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    head = result_file.head(f"bench.{bench}", options.commit)
    head["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    if options.model in STAND_INS:
        head["note"] = f"{options.model}: experts replaced by dense MLPs of the width that a token uses"
    out = options.out or result_file.RESULTS / f"{bench}_{options.model}.json"

    def save(records: list[dict], left_out: list[dict]) -> None:
        result_file.write(head | {"left_out": left_out, "records": records}, out)

    limits = {"jobs": options.jobs, "time_limit": options.time_limit, "turn_limit": options.turn_limit}
    return save, limits | {"memory": options.memory * 1e9, "lock": options.lock}
