"""How the channels of a projection fall into parts, groups and gates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive channels: `groups` times `width` of them.

    scale: None, or each group's vector is divided by its length, as `numerics.l2_normalize` does, and scaled.
    """

    groups: int
    width: int
    scale: float | None = None

    @property
    def channels(self) -> int:
        return self.groups * self.width


@dataclasses.dataclass(frozen=True)
class Gate:
    """A float32 scalar of every head from channels first .. first + heads of a projection.

    function: of `numerics.gate_value`. limit: lowest and highest value, where the function takes one.
    """

    function: str
    first: int
    heads: int
    limit: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class AttentionParts:
    """How the channels of an attention layer's projection fall into heads of `width`.

    They are `heads` of queries, each with its output gate behind it where `gated`, then `groups` of keys,
    then as many of values.

    rotated: first channels of a head of queries or keys that position rotates. eps, offset: of the RMS norms
    of queries and keys, whose weights `offset` is added to.
    """

    heads: int
    groups: int
    width: int
    gated: bool = False
    rotated: int = 0
    eps: float = 0.0
    offset: float = 0.0

    @property
    def queries_every(self) -> int:
        """Heads' widths from one head of queries to the next."""
        return 2 if self.gated else 1

    @property
    def units(self) -> int:
        """Heads' widths in all."""
        return self.queries_every * self.heads + 2 * self.groups
