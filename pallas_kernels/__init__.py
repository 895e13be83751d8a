"""GPU kernels of the ReplaySSM recurrences, arrays in and arrays out, with the numerics they share with plain JAX."""
