"""Strictness of every test: types and shapes are checked, and no dtype or rank is promoted silently."""

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typechecking  # noqa: F401  (the hook names it)

# Before any of the three packages is imported, so that all of their functions are checked.
install_import_hook(["replayssm_jax", "pallas_kernels", "models"], "tests.typechecking.typechecker")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# One example may compile, which takes seconds.
settings.register_profile("compiling", deadline=None, print_blob=True)
settings.load_profile("compiling")
