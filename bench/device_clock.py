"""A clock that a compiled program reads on the device, between two of its operations."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


def nanoseconds(after: jax.Array) -> jax.Array:
    """The device's clock, uint32 [], read when `after` (int32 []) has been computed.

    The low 32 bits: differences in uint32 arithmetic are right up to 4.29 seconds. On an NVIDIA GPU the
    global timer, whose steps are about a microsecond; elsewhere the host's clock, through a callback.
    """
    return jax.lax.platform_dependent(after, cuda=_global_timer, default=_host_clock)


def _global_timer(after: jax.Array) -> jax.Array:
    from jax.experimental.pallas import triton

    ticks = jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(value, clock):
        # Triton wants an operand, which the instruction has not, and knows signed integers only.
        (clock[...],) = triton.elementwise_inline_asm(
            "mov.u32 $0, %globaltimer_lo;",
            args=[value[...]],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[ticks],
        )

    params = triton.CompilerParams(num_warps=1)
    clock = pl.pallas_call(read, out_shape=ticks, compiler_params=params, name="device_clock")(after[None])
    return jax.lax.bitcast_convert_type(clock[0], jnp.uint32)


def _host_clock(after: jax.Array) -> jax.Array:
    def read(_) -> np.ndarray:
        return np.array(time.perf_counter_ns() % 2**32, np.uint32)

    return jax.pure_callback(read, jax.ShapeDtypeStruct((), jnp.uint32), after)
