"""From tokens to text while they come in: whole characters only, and an end at a stop string."""

from collections.abc import Sequence
from typing import Any

# What a decoder writes for bytes that are not, or not yet, a character.
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of one row, growing token by token.

    tokenizer: a transformers tokenizer. stop_strings: the text ends before the first of them to appear.

    `text` is all text so far, `stopped` whether a stop string ended it. Text that may still change (bytes of
    an unfinished character) and text that may turn out to be the beginning of a stop string is held back from
    the pieces until it is decided, so the pieces always join to the final text.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()):
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._window: list[int] = []
        self._settled = 0
        self._decoded = 0
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take further tokens; returns the new text that is certain."""
        if self.stopped or not tokens:
            return ""
        self._window.extend(tokens)
        window_text = decode(self._tokenizer, self._window)
        certain = window_text.rstrip(_UNFINISHED)
        new = certain[self._decoded :]
        self._decoded = max(self._decoded, len(certain))
        if len(certain) == len(window_text):
            self._forget()
        return self._grow(new, final=False)

    def finish(self) -> str:
        """No tokens follow: returns the text held back so far."""
        if self.stopped:
            return ""
        rest = decode(self._tokenizer, self._window)[self._decoded :]
        self._window = []
        return self._grow(rest, final=True)

    def _forget(self) -> None:
        """At a whole character, keep the tokens since the whole character before: the decoder's context."""
        if self._settled:
            self._window = self._window[self._settled :]
            self._decoded = len(decode(self._tokenizer, self._window))
        self._settled = len(self._window)

    def _grow(self, new: str, final: bool) -> str:
        longest = max(map(len, self._stop_strings), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += new
        hits = [at for stop in self._stop_strings if (at := self.text.find(stop, search_from)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self.stopped = True
        certain = len(self.text) if final or self.stopped else len(self.text) - self._undecided()
        piece = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece

    def _undecided(self) -> int:
        """Length of the longest ending of the text that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=0)
        for size in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop_strings):
                return size
        return 0


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of `tokens` without special tokens, exactly as the tokens spell it."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
