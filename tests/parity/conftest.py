"""Every parity test needs torch and nothing else that is not a dependency."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_is_installed():
    pytest.importorskip("torch", reason="parity tests compare with torch: install the parity extra")
