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
