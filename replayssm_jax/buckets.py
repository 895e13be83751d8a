"""Shapes that prompts are cut into, so that prompt lengths do not decide how often XLA compiles."""

from collections.abc import Sequence

SMALLEST_BUCKET = 16
PREFILL_CHUNK = 512
LENGTH_STEP = 256
# Prompts that share a call have a cache of their own on their way in: at most this part of the batch's rows.
GROUP_SHARE = 8


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


def rows_together(bucket: int, batch: int, tokens: int) -> int:
    """Rows of the program that takes prompts' last chunks of this bucket, in a batch of so many rows.

    tokens: that one call may take. Which prompts wait, and how many, does not matter: a prompt always passes
    through the same programs.
    """
    return max(1, min(tokens // bucket, batch // GROUP_SHARE))


def covering_lengths(longest: int, max_length: int, batch: int, tokens: int) -> list[int]:
    """Lengths of prompts that pass through every program that prompts up to the longest may need."""
    lengths, below = [], 0
    top = prefill_buckets(max_length)[-1]
    for bucket in prefill_buckets(max_length):
        if longest - top > below and rows_together(bucket, batch, tokens) > 1:
            # Whole chunks have a row of their own, which then joins a group.
            lengths.append(top + min(bucket, longest - top))
        elif longest > below:
            lengths.append(min(bucket, longest))
        below = bucket
    return lengths


def prefill_groups(
    lengths: Sequence[int], max_length: int, batch: int, tokens: int
) -> list[tuple[int, list[int]]]:
    """Prompts of these lengths that are prefilled together: (rows of the program, indices into `lengths`).

    A group's prompts have the same last bucket and are no more than the program has rows.
    """
    by_bucket: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        bucket, _ = prefill_chunks(length, max_length)[-1]
        by_bucket.setdefault(bucket, []).append(index)
    groups = []
    for bucket in sorted(by_bucket):
        rows = rows_together(bucket, batch, tokens)
        members = by_bucket[bucket]
        groups += [(rows, members[i : i + rows]) for i in range(0, len(members), rows)]
    return groups


def rounded_length(need: int, limit: int | None) -> int:
    """`need` positions rounded up to a multiple of 256, but not beyond `limit`."""
    rounded = -(-need // LENGTH_STEP) * LENGTH_STEP
    return rounded if limit is None else max(need, min(rounded, limit))
