"""Generating text: prompts of any number and length go through a fixed number of rows."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from replayssm_jax import backend
from replayssm_jax.api import Loaded
from replayssm_jax.buckets import covering_lengths, rounded_length
from replayssm_jax.cache import Cache, check_usable
from replayssm_jax.config import DEFAULT_REPLAY, DecodingConfig, ReplayConfig
from replayssm_jax.drafters import Speculative, drafter_of, with_window
from replayssm_jax.memory import refuse_what_cannot_fit
from replayssm_jax.prompts import encode_prompts, refuse_empty
from replayssm_jax.sampling import DEFAULT_SAMPLING, Sampling
from replayssm_jax.scheduler import Request, Scheduler, Stats
from replayssm_jax.speculative import Drafter, NoDrafts
from replayssm_jax.text import TextStream


@dataclass(frozen=True)
class Generation:
    """What `generate` returns; entry i of every list belongs to prompt i.

    tokens: new token ids, a stop id that ended the text included.
    text: their text without that id and without anything from a stop string on; None without a tokenizer.
    logprobs: log-softmax of the raw logits over the vocabulary, at each of `tokens`.
    finish_reasons: "stop" (a stop id or a stop string) or "length".
    cache: all tokens but the newest of each row, for `continue_from`; None when there were more prompts than
        rows. drafter_state: what the drafter keeps of them.
    """

    tokens: list[list[int]]
    text: list[str] | None
    logprobs: list[list[float]]
    finish_reasons: list[Literal["stop", "length"]]
    stats: Stats
    cache: Cache | None = field(repr=False)
    drafter_state: Any = field(repr=False)


class Piece(NamedTuple):
    """New output of one prompt: its index, the text that became certain, the tokens that are new."""

    prompt: int
    text: str
    tokens: list[int]


def generate(
    loaded: Loaded,
    prompts: Any,
    sampling: Sampling = DEFAULT_SAMPLING,
    *,
    replay: DecodingConfig | None = DEFAULT_REPLAY,
    speculative: Speculative | None = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    continue_from: Generation | None = None,
    attention_mask: Any = None,
    spread_flushes: bool | None = None,
    progress: bool | None = None,
) -> Generation:
    """Continue every prompt.

    loaded: from `load`.
    prompts: a list of texts or of token-id lists.
    replay: how the cache decodes, None for the eager method; by default replay, or the eager method for so
        few rows that it is faster.
    speculative: what drafts tokens that a step verifies together, None for one token a step. Greedy texts
        stay the same and sampled ones keep their distribution. Sets the window of `replay`.
    max_length: positions a row can hold. A prompt needs its length + max_new_tokens - 1 of them, as the last
        token is not fed. None: the longest need, rounded up to a multiple of 256 to compile rarely.
    max_rows: rows that decode side by side; when prompts are more, a finished row takes the next one.
    continue_from: an earlier result, whose cache is donated and sets replay and max_length. Its prompt i
        goes on: its last token is fed first, then prompts[i] (prompts=None: nothing more).
    attention_mask: 0/1 for each token id of each prompt, which may be padded on either side.
    spread_flushes: let the rows of prompts that start together rewrite their checkpoints at different steps,
        by prompt index, so that steps take equally long. Where a text is folded then depends on its index,
        which changes it by the rounding there. None: where that is float32 rounding and the GPU kernels run.
    progress: show a progress bar; None: on a terminal, from the first second on.

    What a prompt yields depends neither on the other prompts nor on the row it sits in, but for the rounding
    of products whose shape is the number of rows. On a GPU prompts of like length enter in groups of a size
    that the number of rows and the length fix, up to 512 tokens and an eighth of the rows at a time; where
    more prompts wait than rows, finished rows wait for up to a group of them. On a CPU prompts enter one by
    one.
    Raises ValueError, in one sentence, for arguments that do not fit, and FloatingPointError when logits are
    not finite.
    """
    scheduler = _prepare(
        loaded,
        prompts,
        sampling,
        replay=replay,
        speculative=speculative,
        max_length=max_length,
        max_rows=max_rows,
        continue_from=continue_from,
        attention_mask=attention_mask,
        spread_flushes=spread_flushes,
    )
    total = len(scheduler.requests) * sampling.max_new_tokens
    off = None if progress is None else not progress
    with tqdm(total=total, unit="tok", delay=0 if progress else 1, disable=off, leave=False) as bar:
        for request, tokens, _ in scheduler.run():
            spared = sampling.max_new_tokens - len(request.tokens) if request.finish_reason else 0
            bar.update(len(tokens) + spared)
    return _result(scheduler)


def stream(
    loaded: Loaded,
    prompts: Any,
    sampling: Sampling = DEFAULT_SAMPLING,
    *,
    replay: DecodingConfig | None = DEFAULT_REPLAY,
    speculative: Speculative | None = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    continue_from: Generation | None = None,
    attention_mask: Any = None,
    spread_flushes: bool | None = None,
) -> Generator[Piece, None, Generation]:
    """Yield the output of `generate` while it is made.

    Arguments as for `generate`; they are checked at once. Yields `Piece(prompt, text, tokens)`: the texts of
    a prompt's pieces join to its `Generation.text`, and none splits a character. The generator's return value
    is the `Generation`.
    """
    scheduler = _prepare(
        loaded,
        prompts,
        sampling,
        replay=replay,
        speculative=speculative,
        max_length=max_length,
        max_rows=max_rows,
        continue_from=continue_from,
        attention_mask=attention_mask,
        spread_flushes=spread_flushes,
    )
    return _pieces(scheduler)


def _pieces(scheduler: Scheduler) -> Generator[Piece, None, Generation]:
    for request, tokens, text in scheduler.run(streaming=True):
        yield Piece(request.index, text, tokens)
    return _result(scheduler)


def warmup(
    loaded: Loaded,
    *,
    rows: int = 1,
    longest_prompt: int = 512,
    max_length: int | None = None,
    replay: DecodingConfig | None = DEFAULT_REPLAY,
    speculative: Speculative | None = None,
) -> Stats:
    """Compile ahead of time what `generate` needs for so many rows and for prompts up to the longest.

    max_length: that of the later calls; None: room for the longest prompt and the default number of new
    tokens, rounded up as `generate` does. Returns statistics with the number of compilations, but for the two
    programs that speculative decoding needs where there are stop strings.
    """
    if max_length is None:
        need = longest_prompt + DEFAULT_SAMPLING.max_new_tokens - 1
        max_length = rounded_length(need, getattr(loaded.config, "max_position_embeddings", None))
    longest = min(longest_prompt, max_length - 1)
    lengths = covering_lengths(longest, max_length, rows, backend.prefill_tokens())
    prompts = [[0] * length for length in lengths]
    prompts += [[0]] * (rows - len(prompts))
    two = Sampling(max_new_tokens=2, stop_ids=())
    return generate(
        loaded,
        prompts,
        two,
        replay=replay,
        speculative=speculative,
        max_length=max_length,
        max_rows=rows,
        progress=False,
    ).stats


def _result(scheduler: Scheduler) -> Generation:
    requests = scheduler.requests
    texts = [request.text.text for request in requests if request.text is not None]
    return Generation(
        tokens=[request.tokens for request in requests],
        text=texts if len(texts) == len(requests) else None,
        logprobs=[request.logprobs for request in requests],
        finish_reasons=[request.finish_reason or "length" for request in requests],
        stats=scheduler.stats(),
        cache=scheduler.cache if len(requests) <= scheduler.batch else None,
        drafter_state=scheduler.state if len(requests) <= scheduler.batch else None,
    )


def _prepare(
    loaded: Loaded,
    prompts: Any,
    sampling: Sampling,
    *,
    replay: DecodingConfig | None,
    speculative: Speculative | None,
    max_length: int | None,
    max_rows: int | None,
    continue_from: Generation | None,
    attention_mask: Any,
    spread_flushes: bool | None,
) -> Scheduler:
    """Check everything, then make the cache and the queue."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling, got {sampling!r}.")
    if not isinstance(speculative, Speculative | None):
        raise ValueError(f"speculative must be a Speculative, or None, got {speculative!r}.")
    for name, value in (("max_rows", max_rows), ("max_length", max_length)):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, or None, got {value!r}.")
    if sampling.stop_strings and loaded.tokenizer is None:
        raise ValueError("stop_strings need text, but the checkpoint has no tokenizer.")
    drafter = drafter_of(speculative, loaded)
    cache = state = None
    if continue_from is None:
        replay = with_window(replay, speculative)
        fed = encode_prompts(
            prompts, loaded.tokenizer, loaded.config.vocab_size, attention_mask=attention_mask
        )
        refuse_empty(fed)
        committed = [0] * len(fed)
        batch = min(len(fed), max_rows or len(fed))
        if replay is DEFAULT_REPLAY:
            replay = backend.default_method(loaded.model, batch)
    else:
        cache = _cache_of(continue_from, replay, speculative, max_length, max_rows)
        state = _state_of(continue_from, cache, loaded, drafter)
        fed = _continued(loaded, prompts, attention_mask, continue_from.tokens)
        committed = (np.asarray(cache.start) + np.asarray(cache.length)).tolist()
        batch, replay, max_length = cache.batch, cache.replay, cache.max_length
    max_length = _checked_length(loaded.config, fed, committed, sampling.max_new_tokens, max_length)
    if cache is None:
        refuse_what_cannot_fit(loaded.model, batch, max_length, replay, drafter)
    requests = [
        Request(
            index=i,
            fed=ids,
            committed=done,
            text=None if loaded.tokenizer is None else TextStream(loaded.tokenizer, sampling.stop_strings),
        )
        for i, (ids, done) in enumerate(zip(fed, committed, strict=True))
    ]
    return Scheduler(
        loaded.model,
        requests,
        sampling=sampling,
        vocab_size=chosen_vocabulary(loaded, sampling.vocab_size),
        stop_ids=tuple(loaded.stop_ids if sampling.stop_ids is None else sampling.stop_ids),
        batch=batch,
        max_length=max_length,
        replay=replay,
        cache=cache,
        drafter=drafter,
        drafts=0 if speculative is None else speculative.draft_tokens,
        state=state,
        spread_flushes=spread_flushes,
    )


def chosen_vocabulary(loaded: Loaded, vocab_size: int | None) -> int:
    """Ids below this may be chosen: as asked, or all that mean a token.

    Raises ValueError when more ids are asked for than the checkpoint's head has.
    """
    rows = loaded.config.vocab_size
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(f"vocab_size is {vocab_size}, but the checkpoint has {rows} token ids.")
    return loaded.vocab_size if vocab_size is None else vocab_size


def _cache_of(
    earlier: Generation,
    replay: DecodingConfig | None,
    speculative: Speculative | None,
    max_length: int | None,
    max_rows: int | None,
) -> Cache:
    """The cache of an earlier result; raises ValueError when it is gone or not what was asked for."""
    cache = earlier.cache
    if cache is None:
        raise ValueError("continue_from has no cache, since it had more prompts than rows.")
    check_usable(cache, "cache of continue_from")
    if speculative is not None and cache.window != speculative.window:
        raise ValueError(
            f"continue_from has window={cache.window}, but draft_tokens={speculative.draft_tokens} needs "
            f"window={speculative.window}."
        )
    if replay is not DEFAULT_REPLAY and _sizes(with_window(replay, speculative)) != _sizes(cache.replay):
        raise ValueError(f"continue_from has replay={cache.replay}, but replay={replay} was given.")
    if max_length not in (None, cache.max_length):
        raise ValueError(
            f"continue_from has max_length={cache.max_length}, but max_length={max_length} was given."
        )
    if max_rows is not None and max_rows < cache.batch:
        raise ValueError(f"continue_from has {cache.batch} rows, but max_rows={max_rows} was given.")
    return cache


def _state_of(earlier: Generation, cache: Cache, loaded: Loaded, drafter: Drafter) -> Any:
    """The drafter's state of an earlier result; raises ValueError when another drafter left it."""
    if isinstance(drafter, NoDrafts):
        return ()
    wanted = jax.eval_shape(lambda: drafter.init(loaded.model, cache.batch, cache.max_length, cache.replay))
    if _shapes(earlier.drafter_state) != _shapes(wanted):
        raise ValueError("continue_from was made with another drafter, or without one.")
    return earlier.drafter_state


def _shapes(state: Any) -> tuple:
    leaves, structure = jax.tree.flatten(state)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _continued(
    loaded: Loaded, prompts: Any, attention_mask: Any, earlier: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Tokens to feed to each row: its last one, then the prompt."""
    prompts = [[]] * len(earlier) if prompts is None else prompts
    more = encode_prompts(
        prompts, loaded.tokenizer, loaded.config.vocab_size, attention_mask=attention_mask, continued=True
    )
    if len(more) != len(earlier):
        raise ValueError(f"continue_from has {len(earlier)} rows, but there are {len(more)} prompts.")
    return [[tokens[-1], *ids] for tokens, ids in zip(earlier, more, strict=True)]


def _sizes(replay: DecodingConfig | None) -> tuple[int, int] | None:
    return (replay.buffer_length, replay.window) if isinstance(replay, ReplayConfig) else None


def _checked_length(
    config: Any, fed: Sequence[Sequence[int]], committed: Sequence[int], new: int, max_length: int | None
) -> int:
    """Positions of a row; raises ValueError when some prompt needs more than there are."""
    context = getattr(config, "max_position_embeddings", None)
    limit = context if max_length is None else max_length
    needs = [done + len(ids) + new - 1 for done, ids in zip(committed, fed, strict=True)]
    longest = int(np.argmax(needs))
    if limit is not None and needs[longest] > limit:
        have = committed[longest] + len(fed[longest])
        limited = f"max_length is {limit}"
        if max_length is None:
            limited = f"the checkpoint's context is {limit} (pass max_length to go beyond it)"
        raise ValueError(
            f"prompt {longest} needs {needs[longest]} positions ({have} tokens, and {new} new ones of which "
            f"the last takes none), but {limited}."
        )
    return rounded_length(needs[longest], context) if max_length is None else max_length
