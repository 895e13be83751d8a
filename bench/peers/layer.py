"""A layer of a peer's for the kernel benchmark."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import peers, timing
from bench.kernel_cases import Case, bounds, phases, programs, record
from bench.shapes import SHAPES


class PeerLayer:
    """Compiles the peer's kernel for every candidate of its launch parameters; times the fastest of them."""

    def __init__(self, case: Case, repeats: int, folder: Path) -> None:
        self.case, self.repeats = case, repeats
        shape = SHAPES[case.shape]
        name = case.method.removeprefix("peer:")
        self.make = functools.partial(peers.find(name, shape.recurrence, case.tokens), folder)
        small = self.make(shape, replace(case, batch=min(case.batch, 16)))
        self.candidates = [
            candidate for candidate in small.candidates() if timing.runs(small.launch, candidate)
        ]
        if not self.candidates:
            raise RuntimeError("the kernel runs with none of its launch parameters")
        self.stamped = small.stamped
        small.wait()
        self.best: tuple[int, ...] = ()

    def measure(self) -> list[dict]:
        case = self.case
        layer = self.make(SHAPES[case.shape], case)
        torch = layer.torch
        cold = torch.ones(timing.FLUSH_BYTES // 4, device="cuda", dtype=torch.int32)
        clock = {"cool": cold.sum, "wait": layer.wait, "keep": layer.keep}
        length = case.buffer_length
        layer.set_lengths(phases(case.batch, case.tokens, length)[0])
        self.best, swept = timing.fastest(self.candidates, layer.launch, **clock)
        listed = (
            programs(case) if layer.replay else [("decode", "synchronised", np.full((1, case.batch), length))]
        )
        launch = functools.partial(layer.launch, self.best)
        # Microseconds of every step of every program: [programs][steps][repeats].
        measured = [[[] for _ in lengths] for _, _, lengths in listed]
        for _ in timing.rounds():
            for (_, _, lengths), steps in zip(listed, measured, strict=True):
                for row, times in zip(lengths, steps, strict=True):
                    layer.set_lengths(row)
                    passes = max(1, self.repeats // (timing.ROUNDS * len(lengths)))
                    times += timing.kernel_times([launch] * passes, **clock)
        records = []
        for (operation, phase, lengths), times in zip(listed, measured, strict=True):
            # A peer that folds the new token with the others has read one fewer before.
            read = lengths - layer.folds_new if layer.replay else np.zeros_like(lengths)
            fields = {
                "implementation": layer.implementation,
                "launch": dict(zip(layer.parameters, self.best, strict=True)),
                "swept": len(swept),
            }
            fields |= bounds(case, read, lengths + case.tokens > length)
            records.append(record(case, np.mean(times, axis=0), operation, phase, **fields))
        self.records = records
        del layer, launch, clock, cold
        torch.cuda.empty_cache()  # Other processes share the device.
        return records

    def check(self) -> None:
        """Compares the launch that was timed with a serial float64 loop, on two rows and, where the kernel's
        sizes are free, two groups."""
        shape = SHAPES[self.case.shape]
        if not self.stamped:
            shape = replace(shape, groups=2, heads=2 * (shape.heads // shape.groups))
        small = self.make(shape, replace(self.case, batch=2))
        error = float(f"{peers.error(small, self.best):.2g}")
        if not error < peers.TOLERANCE:
            raise RuntimeError(f"wrong results: RMS ratio {error} to the float64 loop")
        for one in self.records:
            one["error"] = error
