"""How consecutive channels fall into parts and groups."""

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
