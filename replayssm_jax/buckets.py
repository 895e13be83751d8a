"""Shapes that prompts are cut into, so that prompt lengths do not decide how often XLA compiles."""

SMALLEST_BUCKET = 16
PREFILL_CHUNK = 512
LENGTH_STEP = 256


def prefill_buckets(max_length: int) -> tuple[int, ...]:
    """Token counts that a prefill is compiled for: powers of two from 16 to 512, none above `max_length`."""
    top = min(PREFILL_CHUNK, max_length)
    sizes = []
    size = SMALLEST_BUCKET
    while size < top:
        sizes.append(size)
        size *= 2
    return (*sizes, top)


def prefill_chunks(length: int, max_length: int) -> list[tuple[int, int]]:
    """(bucket, real tokens) of each prefill call that together take `length` tokens.

    Full chunks of the top bucket come first, then the smallest bucket that holds the rest. They depend on the
    prompt's own length only, never on the prompts it shares a batch with.
    """
    buckets = prefill_buckets(max_length)
    full, rest = divmod(length, buckets[-1])
    chunks = [(buckets[-1], buckets[-1])] * full
    if rest:
        chunks.append((next(size for size in buckets if size >= rest), rest))
    return chunks


def rounded_length(need: int, limit: int | None) -> int:
    """`need` positions rounded up to a multiple of 256, but not beyond `limit`."""
    rounded = -(-need // LENGTH_STEP) * LENGTH_STEP
    return rounded if limit is None else max(need, min(rounded, limit))
