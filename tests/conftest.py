"""Strictness of every test: types and shapes are checked, and no dtype or rank is promoted silently.

Most of a test's time would be XLA's optimisation of programs that run once on small arrays. So tests on a CPU
compile with little of it, but for comparisons with other libraries (marker `parity`), which run as users do.
JAX_DISABLE_MOST_OPTIMIZATIONS=0 asks for all of it everywhere.
"""

import gc
import os

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typechecking  # noqa: F401  (the hook names it)

# Before any of the three packages is imported, so that all of their functions are checked.
install_import_hook(["replayssm_jax", "pallas_kernels", "models"], "tests.typechecking.typechecker")

# An interpreted kernel runs its warpgroups as programs that wait for each other in threads of XLA's pool: as
# many threads as cores would starve the one that is waited for.
os.environ.setdefault("PJRT_NPROC", "12")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# One example may compile, which takes seconds.
settings.register_profile("compiling", deadline=None, print_blob=True)
settings.load_profile("compiling")


def pytest_collection_finish(session):
    choice, optimised = "JAX_DISABLE_MOST_OPTIMIZATIONS", ("gpu", "parity")
    if choice not in os.environ and not any(
        item.get_closest_marker(name) for item in session.items for name in optimised
    ):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ[choice] = "1"  # for processes that tests start
    # What was imported stays: it need not be searched for garbage again and again.
    gc.collect()
    gc.freeze()
