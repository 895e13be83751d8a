"""Strictness of every test: types and shapes are checked, and no dtype or rank is promoted silently.

Most of a test's time would be XLA's optimisation of programs that run once on small arrays. So tests on a CPU
compile with little of it. JAX_DISABLE_MOST_OPTIMIZATIONS=0 asks for all of it, as CI does for some of them.
"""

import gc
import os

# An interpreted kernel runs its warpgroups as programs that wait for each other: XLA must run them all at
# once, on however few cores.
os.environ.setdefault("NPROC", "8")

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typechecking  # noqa: F401  (the hook names it)

# Before any of the three packages is imported, so that all of their functions are checked.
install_import_hook(["replayssm_jax", "pallas_kernels", "models"], "tests.typechecking.typechecker")

# Interpreted kernels wait in threads of XLA's pool: as many as cores would starve the one they wait for.
os.environ.setdefault("PJRT_NPROC", "12")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# One example may compile, which takes seconds.
settings.register_profile("compiling", deadline=None, print_blob=True)
settings.load_profile("compiling")


def pytest_collection_finish(session):
    choice = "JAX_DISABLE_MOST_OPTIMIZATIONS"
    if choice not in os.environ and not any(item.get_closest_marker("gpu") for item in session.items):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ[choice] = "1"  # for processes that tests start
    # What was imported stays: it need not be searched for garbage again and again.
    gc.collect()
    gc.freeze()
