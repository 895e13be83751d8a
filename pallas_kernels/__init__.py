"""GPU kernels of the recurrences, arrays in and arrays out, and the numerics they share with plain JAX."""
