"""Layer shapes of published models: one list for tests, benchmarks and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one recurrent layer: recurrence, groups (key heads), heads (value heads), head_dim and
    d_state."""

    recurrence: str
    groups: int
    heads: int
    head_dim: int
    d_state: int

    def state_elements(self) -> int:
        """Elements of one row's state."""
        return self.heads * self.head_dim * self.d_state

    def token_bytes(self, activation_bytes: int) -> int:
        """Bytes of one ring entry of a row: values and keys in the activation dtype, scalars in float32."""
        scalars = 1 if self.recurrence == "mamba2" else 2
        wide = self.heads * self.head_dim + self.groups * self.d_state
        return wide * activation_bytes + scalars * 4 * self.heads


def _mamba2(heads: int, head_dim: int) -> Shape:
    return Shape(recurrence="mamba2", groups=8, heads=heads, head_dim=head_dim, d_state=128)


def _gated_delta(heads: int) -> Shape:
    return Shape(recurrence="gated_delta", groups=16, heads=heads, head_dim=128, d_state=128)


SHAPES = {
    "nano-4b": _mamba2(96, 80),
    "nano-30b": _mamba2(64, 64),
    "super": _mamba2(128, 64),
    "ultra": _mamba2(256, 64),
    "qwen3.5-2b": _gated_delta(16),
    "qwen3.5-4b": _gated_delta(32),
    "qwen3.5-27b": _gated_delta(48),
    "q122": _gated_delta(64),
}
