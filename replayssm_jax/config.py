"""How a cache decodes: by replay, or by the eager method."""

from dataclasses import dataclass
from typing import ClassVar

from replayssm_jax.precision import BITS, check_format

IMPLEMENTATIONS = ("auto", "xla", "pallas")
ROUNDINGS = ("nearest", "stochastic")
SKIPS = ("off", "exact", "bounded")
PRECISIONS = tuple(
    (recurrence, read)
    for recurrence in BITS
    for read in BITS
    if read == recurrence or BITS[read] < BITS[recurrence]
)


def _check_implementation(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f'implementation must be "auto", "xla" or "pallas", got {implementation!r}.')


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """ReplaySSM decoding: a checkpoint of the state and a ring of the inputs since then.

    buffer_length: L, committed tokens a row may hold in the ring before its checkpoint is rewritten.
    window: the largest number of tokens one `step` may take (1 + drafts for speculative verification).
    implementation: "xla" is portable JAX, "pallas" the GPU kernels; a request that cannot be served raises
        when the cache is made. "auto" takes the kernels where they can serve, else portable JAX.

    recurrence: format of the checkpoint, of `precision.FORMATS`.
    read: format that outputs read. Where it is not that of the recurrence, every rewrite of the checkpoint
        also writes a copy for them, and its error never enters the recurrence. A format below fp32 for both
        is one stored state that serves as both, for comparison.
    rounding: of the checkpoint, "nearest" or "stochastic" with the rows' seeds; a copy rounds to nearest.

    skip_forgotten: leave out reads of the checkpoint of heads that have decayed so far since that it no
        longer shows (see `forgotten`): "exact" where outputs and checkpoints keep their bits, "bounded" also
        where what a read adds is below 2^-9 (16-bit activations) or 2^-25 of the head's output when it last
        flushed, and what a flush drops below 2^-25 of every new row.

    Raises ValueError for sizes below 1, for buffer_length < window, for an unknown implementation, format,
    rounding or way of skipping, and for formats that make no sense together.
    """

    buffer_length: int = 16
    window: int = 1
    implementation: str = "auto"
    recurrence: str = "fp32"
    read: str = "fp32"
    rounding: str = "nearest"
    skip_forgotten: str = "off"

    def __post_init__(self):
        for name in ("buffer_length", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        if self.buffer_length < self.window:
            raise ValueError(
                f"buffer_length must be at least window: got buffer_length={self.buffer_length}, "
                f"window={self.window}."
            )
        _check_implementation(self.implementation)
        check_format("recurrence", self.recurrence)
        check_format("read", self.read)
        if self.rounding not in ROUNDINGS:
            raise ValueError(f'rounding must be "nearest" or "stochastic", got {self.rounding!r}.')
        if self.skip_forgotten not in SKIPS:
            raise ValueError(
                f'skip_forgotten must be "off", "exact" or "bounded", got {self.skip_forgotten!r}.'
            )
        if (self.recurrence, self.read) not in PRECISIONS:
            raise ValueError(
                f'read="{self.read}" makes no sense with recurrence="{self.recurrence}": a copy holds fewer '
                "bits than the checkpoint that it is made from, or there is none."
            )
        if self.rounding == "stochastic" and self.recurrence == "fp32":
            raise ValueError('rounding="stochastic" needs a recurrence below fp32: fp32 is not rounded.')


@dataclass(frozen=True, kw_only=True)
class EagerConfig:
    """Eager decoding: every step of one token rewrites the state; nothing can be taken back.

    implementation: as in `ReplayConfig`. Where a cache is made, `replay=None` means EagerConfig().
    Raises ValueError for an unknown implementation.
    """

    buffer_length: ClassVar[int] = 1
    window: ClassVar[int] = 1
    implementation: str = "auto"

    def __post_init__(self):
        _check_implementation(self.implementation)


DecodingConfig = ReplayConfig | EagerConfig
DEFAULT_REPLAY = ReplayConfig()
