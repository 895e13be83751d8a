"""Benchmarks, studies and the training of the embedded checkpoints; they run from a checkout."""
