"""Writes tests/golden/*.npz: what transformers computes for the tiny checkpoints of `cases`.

Run from the repository root, with torch and transformers 5.24 installed:
    python -m tests.parity.make_golden

A file holds `logits` float32 [prompts, V] at the end of every prompt, and for the last prompt its greedy
continuation: `tokens` int16 [256] and `margins` float32 [256] (distance of the two largest logits).
"""

import tempfile
from pathlib import Path

import numpy as np

from tests.parity.cases import CASES, margin, prompts
from tests.parity.reference import full_logits, greedy, reference

FOLDER = Path(__file__).resolve().parent.parent / "golden"
TOKENS = 256


def main() -> None:
    """Writes one file a case."""
    FOLDER.mkdir(exist_ok=True)
    for name, raw in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            model, _ = reference(Path(directory), raw)
            rows = prompts(name)
            logits = np.concatenate([full_logits(model, row[None])[:, -1] for row in rows])
            tokens, steps = greedy(model, rows[-1][None], TOKENS)
        margins = margin(steps[0])
        np.savez_compressed(
            FOLDER / f"{name}.npz", logits=logits, tokens=tokens[0].astype(np.int16), margins=margins
        )
        print(f"{name}: smallest margin {margins.min():.4f}, {len(set(tokens[0]))} different tokens")


if __name__ == "__main__":
    main()
