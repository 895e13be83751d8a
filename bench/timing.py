"""Kernel times by CUPTI with a cold L2 cache, of JAX programs and of anything else in this process."""

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# More than the L2 cache of any device in use (60 MB on an H200).
FLUSH_BYTES = 256 << 20
ROUNDS, PAUSE_SECONDS = 4, 0.03


def _extension() -> Any:
    # jax.experimental.mosaic.gpu.profiler, the public way to it, takes jitted functions only.
    from jax._src.lib import mosaic_gpu

    if mosaic_gpu is None:
        raise RuntimeError("kernel times need jaxlib with its CUDA plugin")
    return mosaic_gpu._mosaic_gpu_ext


def kernel_times(
    launches: Sequence[Callable[[], Any]],
    *,
    cool: Callable[[], Any],
    wait: Callable[[], Any],
    keep: Callable[[str], bool],
) -> list[float]:
    """Microseconds that the kernels of each launch ran, in order, summed over its kernels named by `keep`.

    `cool` runs before each launch and is not counted: it reads a large buffer, so that the L2 cache holds
    clean lines of something else. `wait` blocks until the device is idle.
    """
    extension = _extension()
    wait()
    extension._cupti_init()
    try:
        for launch in launches:
            cool()
            launch()
        wait()
    finally:
        timings = extension._cupti_get_timings(True)
    # The first kernel of all is the cooling's: after a launch it marks the next one.
    sums, first = [0.0], None
    for name, milliseconds in timings or ():
        first = first or name
        if keep(name):
            sums[-1] += milliseconds * 1e3
        elif name == first and sums[-1]:
            sums.append(0.0)
    if len(sums) != len(launches) or not sums[-1]:
        seen = sorted({name for name, _ in timings or ()})
        raise RuntimeError(f"{len(launches)} launches, {len(sums)} times of kernels; kernels seen: {seen}")
    return sums


def rounds() -> Iterator[int]:
    """Numbers of the rounds of a measurement, with pauses between them.

    What another program does to the device for some milliseconds then disturbs one round of everything, not
    all times of one thing.
    """
    for index in range(ROUNDS):
        time.sleep(PAUSE_SECONDS if index else 0.0)
        yield index


def fastest(
    candidates: Sequence[Any], run: Callable[[Any], Any], **options: Any
) -> tuple[Any, dict[Any, float]]:
    """The candidate whose `run` takes the least time, and the least microseconds of each."""
    for candidate in candidates:
        run(candidate)
    launches = [functools.partial(run, candidate) for candidate in candidates]
    times = np.min([kernel_times(launches, **options) for _ in rounds()], axis=0)
    least = dict(zip(candidates, times.tolist(), strict=True))
    return min(least, key=lambda candidate: least[candidate]), least


def runs(run: Callable[[Any], Any], candidate: Any) -> bool:
    """Whether `run` compiles and starts; a tile too large for the chip is an answer of a sweep, not a
    failure."""
    try:
        run(candidate)
    except Exception as error:
        print(f"{candidate}: {type(error).__name__}: {str(error)[:120]}")
        return False
    return True


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`, so that processes that share a device take turns on it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
