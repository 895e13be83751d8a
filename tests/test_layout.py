"""What import-linter cannot say about the folder rule, and the state of the documents."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["api", "cli"])
def test_composition_roots_import_models_inside_functions(name):
    tree = ast.parse((ROOT / "replayssm_jax" / f"{name}.py").read_text())
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            imported = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            imported = [statement.module or ""]
        else:
            continue
        assert not [name for name in imported if name.split(".")[0] == "models"]


def test_importing_starts_no_backend_and_changes_no_setting(tmp_path):
    import subprocess
    import sys

    program = (
        "import jax\n"
        "before = dict(jax.config.values)\n"
        "import replayssm_jax, models, pallas_kernels\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a backend was started'\n"
        "assert before == dict(jax.config.values), 'a JAX setting was changed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
