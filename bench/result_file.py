"""The head that every result file shares, and its writing."""

import argparse
import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

RESULTS = Path(__file__).resolve().parent / "results"
CHECKOUT = RESULTS.parent.parent
_PLACES = ("--lock", "--out")


def add_commit(parser: argparse.ArgumentParser) -> None:
    """The option `--commit`, by default that of the checkout."""
    parser.add_argument(
        "--commit", default=commit(), help="for the result file; default: that of the checkout, or unknown"
    )


def commit(checkout: Path = CHECKOUT) -> str:
    """The short hash of a checkout's commit, with "+" where tracked files but for results differ from it;
    "unknown" where git does not tell."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    # A package that is installed below another project's checkout is not that project's.
    if not (checkout / ".git").exists():
        return "unknown"
    results = RESULTS.relative_to(CHECKOUT).as_posix()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{results}")
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def head(bench: str, commit: str) -> dict:
    """Module name, command line, commit, date (UTC), device and versions of this run; add `records` to it."""
    device = jax.devices()[0]
    cores = f", {len(jax.devices())} device(s)"
    name = platform.processor() or platform.machine() if device.platform == "cpu" else device.device_kind
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "bench": bench,
        "command": shlex.join(["python", "-m", bench, *measured(sys.argv[1:])]),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{device.platform} {name}{cores}",
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    }


def measured(arguments: Sequence[str]) -> list[str]:
    """The arguments but for files of the machine, on which no record depends."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [one for before, one in pairs if one.split("=")[0] not in _PLACES and before not in _PLACES]


def write(result: dict, path: Path) -> None:
    """Writes one JSON object, a record a line; the old file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {key: value for key, value in result.items() if key != "records"}
    text = json.dumps(body, indent=1)[:-2]
    records = ",\n".join("  " + json.dumps(record) for record in result["records"])
    partial = path.with_suffix(".partial")
    partial.write_text(f'{text},\n "records": [\n{records}\n ]\n}}\n')
    partial.replace(path)
