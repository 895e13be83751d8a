"""The host side of generation: a queue of prompts, a fixed number of rows, and what each row has produced."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax import backend
from replayssm_jax.buckets import prefill_chunks, prefill_groups, rows_together
from replayssm_jax.cache import Cache, select
from replayssm_jax.compilations import Compilations
from replayssm_jax.config import DecodingConfig, ReplayConfig
from replayssm_jax.decode import (
    DISPATCH_STEPS,
    Block,
    FlatModel,
    Rows,
    Window,
    clear_rows,
    decode,
    empty_cache,
    empty_state,
    first_tokens,
    insert_rows,
    prefill_chunk,
    seat,
    select_state,
    settle,
    verify,
)
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.sampling import Sampling, sampling_params
from replayssm_jax.speculative import Drafter, NoDrafts
from replayssm_jax.text import TextStream

STREAMED_TOKENS = 4

# Row, new tokens, their log-probabilities.
Fresh = tuple[int, list[int], list[float]]
# A row and the request that it is given.
Seat = tuple[int, "Request"]
# Rows to prefill: their cache and drafter's state.
Part = tuple[Cache, Any]


@dataclass(frozen=True)
class Stats:
    """Measurements of one call.

    tokens: returned, over all prompts. prompt_tokens: fed before the first new ones.
    seconds: of the whole call. prefill_seconds: of it, until prompts had their first token.
    tokens_per_second: tokens of decode steps by the seconds spent on those, compilation included; tokens by
        seconds when there was no step.
    steps: forward passes that decode one window a row. flushes: checkpoint rewrites, summed over rows.
    compilations: programs that XLA compiled. rows: decoded side by side.
    tokens_per_step: that a step yields for a row, the acceptance length; 1 without drafts.
    draft_acceptance: of the drafts verified, the share that was returned.
    flush_rate: flushes a step of a row. ring_occupancy: committed ring entries that a step of a row reads.
    These four are means over the decode steps, 0 where there were none.
    """

    tokens: int
    prompt_tokens: int
    seconds: float
    prefill_seconds: float
    tokens_per_second: float
    steps: int
    flushes: int
    compilations: int
    rows: int
    tokens_per_step: float
    draft_acceptance: float
    flush_rate: float
    ring_occupancy: float


@dataclass
class Request:
    """One prompt and what became of it.

    fed: tokens to feed before the first new one. committed: tokens that its row holds already.
    text: its text, None without a tokenizer.
    """

    index: int
    fed: list[int]
    committed: int
    text: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


def _padded(values: list[int], count: int, filler: int = 0) -> np.ndarray:
    return np.array(values + [filler] * (count - len(values)), np.int32)


def spreading_is_free(replay: DecodingConfig) -> bool:
    """Whether spreading the rows' flushes costs no time and changes outputs by float32 rounding alone.

    The GPU kernels fold the rows that flush and no others; portable JAX folds all rows where one does, but
    for a CPU, on which nobody waits for level steps. A state below fp32, or a copy, is rounded wherever a row
    flushes.
    """
    return (
        isinstance(replay, ReplayConfig)
        and replay.implementation == "pallas"
        and (replay.recurrence, replay.read) == ("fp32", "fp32")
    )


class Scheduler:
    """Runs requests through `batch` rows: a finished row is given the next request of the queue.

    drafter, drafts: what proposes how many tokens a step. cache, state: of an earlier run and its drafter,
    whose row i request i goes on with, or None to start afresh. spread_flushes: whether requests start with
    windows of different lengths; None: `spreading_is_free`.
    """

    def __init__(
        self,
        model: Any,
        requests: list[Request],
        *,
        sampling: Sampling,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        batch: int,
        max_length: int,
        replay: DecodingConfig | None,
        cache: Cache | None,
        drafter: Drafter | None = None,
        drafts: int = 0,
        state: Any = None,
        spread_flushes: bool | None = None,
    ):
        self.requests = requests
        self.batch = batch
        self._started = time.perf_counter()
        self._prefill_seconds = self._decode_seconds = 0.0
        self._tally = Counter()
        self._decoded = 0
        self._compilations = Compilations()
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._max_length = max_length
        self._model = FlatModel.of(model)
        self._drafter = FlatModel.of(drafter or NoDrafts())
        self._drafts = drafts
        self._params = sampling_params(sampling, vocab_size, stop_ids)
        self._resumed = cache is not None
        self._in_row: dict[int, Request] = {}
        self._prefill_tokens = backend.prefill_tokens()
        self._parts: dict[int, Part] = {}
        self._window: Window | None = None
        if cache is None:
            with self._compilations:
                self.cache = self._empty_cache(batch, replay)
                self.state = empty_state(self._model, self._drafter, batch, max_length, replay)
            self._queue = deque(requests)
        else:
            # Rows that only have their last token to feed go straight on; the others wait for their prefill.
            self.cache, self.state = cache, () if state is None else state
            self._queue = deque(request for request in requests if len(request.fed) > 1)
            self._in_row = {request.index: request for request in requests if len(request.fed) == 1}
        if spread_flushes is None:
            spread_flushes = spreading_is_free(self.cache.replay)
        self._spread_flushes = spread_flushes
        self._rows = self._first_rows()

    def run(self, streaming: bool = False) -> Iterator[tuple[Request, list[int], str]]:
        """Yields (request, new tokens, new text) until all requests are finished.

        Text comes with the tokens when `streaming` or when stop strings are looked for, else all at a
        request's end.
        """
        token_by_token = streaming or bool(self._sampling.stop_strings)
        limit = max(1, STREAMED_TOKENS // (1 + self._drafts)) if streaming else DISPATCH_STEPS
        if self._sampling.stop_strings:
            # Whether a text goes on is decided here, and the row must not run ahead of it.
            limit = 1
        while self._queue or self._in_row:
            can_fill = self._queue and len(self._in_row) < self.batch
            taken = {}
            for row, tokens, logprobs in self._fill_rows() if can_fill else self._advance(limit):
                request = self._in_row[row]
                taken[row] = (request, *self._take(request, tokens, logprobs, token_by_token))
                if request.finish_reason is not None:
                    del self._in_row[row]
            if not can_fill:
                self._decoded += sum(len(tokens) for _, tokens, _ in taken.values())
            self._settle({row: len(tokens) for row, (_, tokens, _) in taken.items()})
            yield from taken.values()

    def stats(self) -> Stats:
        """Measurements up to now."""
        seconds = time.perf_counter() - self._started
        tokens = sum(len(request.tokens) for request in self.requests)
        rate = self._decoded / self._decode_seconds if self._decoded else tokens / seconds
        tally = self._tally
        row_steps = max(tally["row_steps"], 1)
        return Stats(
            tokens=tokens,
            prompt_tokens=sum(len(request.fed) for request in self.requests),
            seconds=seconds,
            prefill_seconds=self._prefill_seconds,
            tokens_per_second=rate,
            steps=tally["steps"],
            flushes=tally["flushes"],
            compilations=self._compilations.count,
            rows=self.batch,
            tokens_per_step=self._decoded / row_steps,
            draft_acceptance=tally["accepted"] / max(tally["drafted"], 1),
            flush_rate=tally["flushes"] / row_steps,
            ring_occupancy=tally["entries"] / row_steps,
        )

    def _empty_cache(self, batch: int, replay: DecodingConfig | None) -> Cache:
        return empty_cache(self._model, batch, self._max_length, replay)

    def _first_rows(self) -> Rows:
        token, active = np.zeros(self.batch, np.int32), np.zeros(self.batch, bool)
        for row, request in self._in_row.items():
            token[row], active[row] = request.fed[0], True
        return Rows(
            token=jnp.array(token),
            active=jnp.array(active),
            remaining=jnp.array(np.full(self.batch, self._sampling.max_new_tokens, np.int32)),
            prompt=jnp.array(np.arange(self.batch, dtype=np.int32)),
            finite=jnp.array(np.ones(self.batch, bool)),
        )

    def _fill_rows(self) -> list[Fresh]:
        """Prefill requests of the queue into free rows; returns their first tokens."""
        began = time.perf_counter()
        with self._compilations:
            seats = [(row, self._queue.popleft()) for row in self._free_rows()]
            self._in_row.update(seats)
            groups = self._groups(seats)
            drawn = [self._admit(group, rows) for rows, group in groups]
            drawn, finite = jax.device_get((drawn, self._rows.finite))
        fresh = []
        for (_, group), (tokens, logprobs) in zip(groups, drawn, strict=True):
            for (row, _), token, logprob in zip(group, tokens.tolist(), logprobs.tolist(), strict=False):
                fresh.append((row, [token], [logprob]))
        fresh.sort()
        if not self._queue:
            self._parts.clear()
        self._refuse_not_finite(fresh, finite)
        self._prefill_seconds += time.perf_counter() - began
        return fresh

    def _free_rows(self) -> list[int]:
        """Rows for the next requests of the queue."""
        if self._resumed:
            return [request.index for request in self._queue]
        return [row for row in range(self.batch) if row not in self._in_row][: len(self._queue)]

    def _groups(self, seats: list[Seat]) -> list[tuple[int, list[Seat]]]:
        """Requests that are prefilled together, and the rows of the program that does it."""
        lengths = [len(request.fed) for _, request in seats]
        groups = prefill_groups(lengths, self._max_length, self.batch, self._prefill_tokens)
        return [(rows, [seats[i] for i in members]) for rows, members in groups]

    def _admit(self, seats: list[Seat], rows: int) -> tuple[jax.Array, jax.Array]:
        """Feed the tokens of at most `rows` requests, give them their rows and draw their first tokens.

        Returns those and their logprobs, [rows].
        """
        part = self._part(seats, rows)
        last = []
        for place, (row, request) in enumerate(seats):
            fed = request.fed
            *whole, (bucket, count) = prefill_chunks(len(fed), self._max_length)
            last.append(fed[-count:])
            if not whole:
                continue
            # Chunks before the last have a program of one row.
            alone = part if rows == 1 else self._part([(row, request)], 1)
            for number, (size, _) in enumerate(whole):
                _, alone = self._prefilled(alone, [fed[number * size :][:size]], size)
            if rows == 1:
                part = alone
            else:
                part = insert_rows(self._drafter, *part, *alone, np.array([place], np.int32))
                self._put_by(alone)
        logits, part = self._prefilled(part, last, bucket)
        places = _padded([row for row, _ in seats], rows, self.batch)
        if self.batch == 1:
            self.cache, self.state = part
        else:
            self.cache, self.state = insert_rows(self._drafter, self.cache, self.state, *part, places)
            self._put_by(part)
        new, logprobs = first_tokens(
            logits,
            _padded([request.index for _, request in seats], rows),
            _padded([request.committed + len(request.fed) for _, request in seats], rows),
            np.int32(self._sampling.max_new_tokens),
            self._params,
        )
        self._rows = seat(self._rows, new, places)
        return new.token, logprobs

    def _part(self, seats: list[Seat], rows: int) -> Part:
        """Rows to prefill, the first ones those of the requests."""
        if self._resumed:
            if self.batch == 1:
                return self.cache, self.state
            picked = _padded([row for row, _ in seats], rows)
            return select(self.cache, picked), select_state(self._drafter, self.state, picked)
        prompts = [request.index for _, request in seats]
        full = self.cache.replay.buffer_length
        windows = np.full(rows, full, np.int32)
        if self._spread_flushes:
            windows[: len(seats)] = spread_flush_at(prompts, full, 1 + self._drafts)
        part = (self.cache, self.state) if self.batch == 1 else self._empty_part(rows)
        return clear_rows(self._drafter, *part, _padded(prompts, rows), windows, self._params)

    def _empty_part(self, rows: int) -> Part:
        if rows > 1:
            # One group's cache at a time.
            self._parts = {count: part for count, part in self._parts.items() if count in (1, rows)}
        if rows in self._parts:
            return self._parts.pop(rows)
        state = select_state(self._drafter, self.state, np.zeros(rows, np.int32))
        return self._empty_cache(rows, self.cache.replay), state

    def _put_by(self, part: Part) -> None:
        """Keep a part's buffers for the next requests; those of rows that go on are picked from the cache."""
        if not self._resumed:
            self._parts[part[0].batch] = part

    def _prefilled(self, part: Part, fed: list[list[int]], size: int) -> tuple[jax.Array, Part]:
        """Logits, and the part whose first rows have taken these tokens in one call of the bucket `size`."""
        rows = part[0].batch
        tokens, lengths = np.zeros((rows, size), np.int32), np.zeros(rows, np.int32)
        for place, ids in enumerate(fed):
            tokens[place, : len(ids)], lengths[place] = ids, len(ids)
        logits, cache, state = prefill_chunk(self._model, self._drafter, tokens, lengths, *part)
        return logits, (cache, state)

    def _advance(self, limit: int) -> list[Fresh]:
        """Decode up to `limit` windows of every busy row; returns their tokens."""
        began = time.perf_counter()
        busy = np.array([row in self._in_row for row in range(self.batch)])
        with self._compilations:
            made = self._one_window(busy) if self._host_decides else self._dispatch(busy, limit)
            block, finite = jax.device_get(made)
        fresh = [
            (row, block.tokens[row, :count].tolist(), block.logprobs[row, :count].tolist())
            for row, count in enumerate(block.count.tolist())
            if count
        ]
        self._refuse_not_finite(fresh, finite)
        self._tally.update({name: int(count) for name, count in vars(block.tally).items()})
        self._decode_seconds += time.perf_counter() - began
        return fresh

    @property
    def _host_decides(self) -> bool:
        """Whether a window may have to be cut short where a stop string ends."""
        return self._drafts > 0 and bool(self._sampling.stop_strings)

    @property
    def _wanted(self) -> int:
        """Rows that the next requests of the queue enter together."""
        bucket, _ = prefill_chunks(len(self._queue[0].fed), self._max_length)[-1]
        return min(len(self._queue), rows_together(bucket, self.batch, self._prefill_tokens))

    def _dispatch(self, busy: np.ndarray, limit: int) -> tuple[Block, jax.Array]:
        # While prompts wait, the dispatch ends when as many rows are free as are prefilled together.
        least_active = 1 + len(self._in_row) - self._wanted if self._queue else 1
        self._rows, self.cache, self.state, block = decode(
            self._model,
            self._drafter,
            self._rows,
            self.cache,
            self.state,
            busy,
            np.int32(limit),
            np.int32(least_active),
            self._params,
            self._drafts,
        )
        return block, self._rows.finite

    def _one_window(self, busy: np.ndarray) -> tuple[Block, jax.Array]:
        self._rows, self.cache, self.state, window = verify(
            self._model,
            self._drafter,
            self._rows,
            self.cache,
            self.state,
            busy,
            self._params,
            self._drafts,
        )
        self._window = window
        return Block(window.tokens, window.logprobs, window.count, window.tally), window.finite

    def _settle(self, taken: dict[int, int]) -> None:
        """Commit the window that waits for it, as far as its rows' tokens were taken."""
        if self._window is None:
            return
        began = time.perf_counter()
        count = np.array([taken.get(row, 0) for row in range(self.batch)], np.int32)
        with self._compilations:
            self._rows, self.cache, self.state = settle(
                self._model,
                self._drafter,
                self._rows,
                self.cache,
                self.state,
                self._window,
                count,
                self._params,
            )
        self._window = None
        self._decode_seconds += time.perf_counter() - began

    def _take(
        self, request: Request, tokens: list[int], logprobs: list[float], token_by_token: bool
    ) -> tuple[list[int], str]:
        """Record new tokens of a request up to where it ends; returns them and its new text."""
        piece = ""
        if request.text is not None and token_by_token:
            tokens, piece = self._push(request.text, tokens)
        request.tokens += tokens
        request.logprobs += logprobs[: len(tokens)]
        stopped = tokens[-1] in self._stop_ids
        if stopped or (request.text is not None and request.text.stopped):
            request.finish_reason = "stop"
        elif len(request.tokens) == self._sampling.max_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None and request.text is not None:
            if not token_by_token:
                piece = request.text.push(request.tokens[:-1] if stopped else request.tokens)
            piece += request.text.finish()
        return tokens, piece

    def _push(self, text: TextStream, tokens: list[int]) -> tuple[list[int], str]:
        """Give a text its tokens, not beyond a stop string; returns those taken and the new text."""
        spoken = tokens[:-1] if tokens[-1] in self._stop_ids else tokens
        if not self._sampling.stop_strings:
            return tokens, text.push(spoken)
        piece = ""
        for taken, token in enumerate(spoken, 1):
            piece += text.push([token])
            if text.stopped:
                return tokens[:taken], piece
        return tokens, piece

    def _refuse_not_finite(self, fresh: list[Fresh], finite: np.ndarray) -> None:
        for row, tokens, _ in fresh:
            request = self._in_row[row]
            if not finite[row]:
                known = request.committed + len(request.fed) + len(request.tokens) + len(tokens) - 1
                raise FloatingPointError(
                    f"The logits of prompt {request.index} (row {row}) are NaN or infinite after {known} "
                    "tokens: weights are damaged, or a value left the range of the dtype."
                )
