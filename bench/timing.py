"""Kernel times by CUPTI with a cold L2 cache, of JAX programs and of anything else in this process."""

import contextlib
import fcntl
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# More than the L2 cache of any device in use (60 MB on an H200).
FLUSH_BYTES = 256 << 20


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

    Every launch must start the same number of such kernels. `cool` runs before each launch and is not
    counted: it reads a large buffer, so that the L2 cache holds clean lines of something else. `wait` blocks
    until the device is idle.
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
    times = [milliseconds * 1e3 for name, milliseconds in timings or () if keep(name)]
    each, rest = divmod(len(times), len(launches))
    if rest or not each:
        seen = sorted({name for name, _ in timings or ()})
        raise RuntimeError(f"{len(times)} kernels in {len(launches)} launches; kernels seen: {seen}")
    return [sum(times[i * each : (i + 1) * each]) for i in range(len(launches))]


def fastest(
    candidates: Sequence[Any], run: Callable[[Any], Any], repeats: int = 4, **options: Any
) -> tuple[Any, dict[Any, float]]:
    """The candidate whose `run` takes the least time, and the median microseconds of each."""
    for candidate in candidates:
        run(candidate)
    launches = [functools.partial(run, candidate) for candidate in candidates for _ in range(repeats)]
    times = kernel_times(launches, **options)
    medians = {
        candidate: statistics.median(times[i * repeats : (i + 1) * repeats])
        for i, candidate in enumerate(candidates)
    }
    return min(medians, key=lambda candidate: medians[candidate]), medians


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
