"""Loading of peers' files and the float64 loop that they are checked against."""

import sys
import types

import numpy as np
import pytest

from bench.peers import loading
from bench.peers.base import mamba2_rates, serial_step
from bench.shapes import Shape
from tests import oracles

SHAPE = {
    "mamba2": Shape(recurrence="mamba2", groups=2, heads=4, head_dim=3, d_state=5),
    "gated_delta": Shape(recurrence="gated_delta", groups=2, heads=4, head_dim=3, d_state=5),
}


@pytest.mark.parametrize("recurrence", list(SHAPE))
def test_serial_step_is_the_oracle(recurrence):
    rng = np.random.default_rng(0)
    shape = SHAPE[recurrence]
    token = {
        "values": rng.standard_normal((2, 4, 3)),
        "keys": rng.standard_normal((2, 2, 5)),
        "reader": rng.standard_normal((2, 2, 5)),
        "first": -rng.uniform(0.1, 1.0, (2, 4)),
        "second": rng.uniform(0.1, 1.0, (2, 4)),
    }
    state = rng.standard_normal((2, 4, 3, 5))
    outputs, new = serial_step(shape, state, token)
    values = token["values"].reshape(2, 2, 1, 6)
    keys, reader = token["keys"][:, :, None], token["reader"][:, :, None]
    first, second = token["first"][:, None], token["second"][:, None]
    if recurrence == "mamba2":
        wanted = oracles.mamba2(state, values, keys, first, reader, *mamba2_rates(4))
    else:
        wanted = oracles.gated_delta(state, values, keys, first, second, reader)
    np.testing.assert_allclose(outputs, wanted[0][:, 0], rtol=1e-12)
    np.testing.assert_allclose(new, wanted[1], rtol=1e-12)


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "peer_of_a_test" / "ops"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise ImportError('needs a whole server')")
    (package / "kernel.py").write_text("from peer_of_a_test.ops.helper import VALUE")
    (package / "helper.py").write_text("VALUE = 7")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("peer_of_a_test")]:
        del sys.modules[name]


def test_a_kernel_file_loads_without_the_packages_above_it(checkout):
    assert loading.load(checkout, "peer_of_a_test.ops.kernel").VALUE == 7


def test_without_a_folder_the_installed_package_is_meant(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="peer_of_a_test"):
        loading.load(tmp_path / "nothing", "peer_of_a_test.ops.kernel")


def test_two_checkouts_of_vllm_stay_apart(tmp_path, monkeypatch):
    triton = types.ModuleType("triton")
    for name in ("triton", "triton.language", "triton.language.extra"):
        monkeypatch.setitem(sys.modules, name, triton)
    monkeypatch.setattr(triton, "language", triton, raising=False)
    monkeypatch.setattr(triton, "libdevice", triton, raising=False)
    for value in (1, 2):
        folder = tmp_path / str(value) / "vllm" / "ops"
        folder.mkdir(parents=True)
        (folder / "kernel.py").write_text(
            "import vllm.envs as envs\nfrom vllm.platforms import current_platform\n"
            f"VALUE = {value}\nFOLDER = envs.VLLM_TUNED_CONFIG_FOLDER\n"
            "KIND = current_platform.is_cuda(), current_platform.is_rocm()"
        )
    (first,) = loading.load_vllm(tmp_path / "1", "vllm.ops.kernel")
    (second,) = loading.load_vllm(tmp_path / "2", "vllm.ops.kernel")
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert first.FOLDER is None
    assert first.KIND == (True, False)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


def test_a_retuned_kernel_takes_our_parameters_and_grid():
    launched = []

    class Kernel:
        arg_names = ("x", "BLOCK")

        def __getitem__(self, grid):
            return lambda **arguments: launched.append((grid, arguments))

    kernel = loading.Retuned(Kernel(), lambda meta: (64 // meta["BLOCK"],))
    kernel.meta = {"BLOCK": 16, "num_warps": 2}
    kernel["grid of the wrapper"]("array", 4, num_warps=8)
    assert launched == [((4,), {"x": "array", "BLOCK": 16, "num_warps": 2})]
