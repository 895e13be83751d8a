"""Refusing a batch that the device's memory cannot hold, before any of it is allocated."""

from typing import Any

import jax

from replayssm_jax import backend
from replayssm_jax.buckets import SMALLEST_BUCKET, rows_together
from replayssm_jax.config import DecodingConfig
from replayssm_jax.speculative import Drafter, NoDrafts


def free_bytes(model: Any) -> int | None:
    """Bytes that can still be allocated where the model lives; None where the device does not say (CPUs)."""
    device = min(jax.tree.leaves(model)[0].devices(), key=lambda device: device.id)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def row_bytes(
    model: Any, max_length: int, replay: DecodingConfig | None, drafter: Drafter | None = None
) -> int:
    """Bytes of cache, and of the drafter's state, that one row takes."""
    drafter = drafter or NoDrafts()
    shapes = jax.eval_shape(
        lambda: (model.init_cache(1, max_length, replay), drafter.init(model, 1, max_length, replay))
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def with_group(rows: int) -> int:
    """Rows of a batch and, but for a single one, of the largest group of prompts on their way in."""
    group = rows_together(SMALLEST_BUCKET, rows, backend.prefill_tokens())
    # Beside a group, whole chunks of long prompts have a row of their own.
    return rows + (0 if rows <= 1 else group + (group > 1))


def refuse_what_cannot_fit(
    model: Any, rows: int, max_length: int, replay: DecodingConfig | None, drafter: Drafter | None = None
) -> None:
    """Raises ValueError saying how many rows would fit, when `rows` rows, and those to prefill, do not."""
    free = free_bytes(model)
    if free is None:
        return
    each = row_bytes(model, max_length, replay, drafter)
    if with_group(rows) * each <= free:
        return
    fitting = next(count for count in range(rows, -1, -1) if with_group(count) * each <= free)
    raise ValueError(
        f"{rows} rows of {max_length} positions need {with_group(rows) * each / 1e9:.2f} GB of cache, but "
        f"{free / 1e9:.2f} GB are free: {fitting} rows would fit (max_rows)."
    )
