"""The head that every result file shares, and its writing."""

import datetime
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

RESULTS = Path(__file__).resolve().parent / "results"
_PLACES = ("--lock", "--out")


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
