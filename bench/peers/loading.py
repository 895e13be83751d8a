"""Loading of the peers' kernel files, from installed packages or from a folder that version control ignores.

The folder (`--peers DIR`) holds, for each peer, a checkout or just the kernel files at their paths inside it:

- `vllm`: vllm/model_executor/layers/mamba/ops, vllm/third_party/flash_linear_attention/ops
- `replayssm`: the fork of vLLM by the authors of ReplaySSM (Johnny-Liou/ReplaySSM)
- `fla`: flash-linear-attention's package of that name
- `mamba`: mamba_ssm of state-spaces/mamba
- `flashinfer`: FlashInfer's compiled Mamba modules, *.so
- `versions.json`: an object of their versions, for the result file

A kernel file is imported without running the `__init__` of the packages above it, which would pull in a
whole server.
"""

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load(folder: Path | None, name: str) -> Any:
    """Module `name` from `folder`, or from the installed package when there is no such folder."""
    if folder is None or not folder.is_dir():
        return importlib.import_module(name)
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent not in sys.modules:
            package = types.ModuleType(parent)
            package.__path__ = [str(folder.joinpath(*parts[:depth]))]
            vars(package)["__version__"] = "of a checkout"  # flash-linear-attention asks for its own.
            sys.modules[parent] = package
    return importlib.import_module(name)


@contextlib.contextmanager
def vllm_stand_ins() -> Iterator[None]:
    """While it lasts, the few names that vLLM's kernel files take from the rest of vLLM; afterwards vLLM can
    be loaded anew."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

    class Platform:
        """An NVIDIA device that is not a Blackwell."""

        def is_cuda(self) -> bool:
            return True

        is_cuda_alike = is_cuda

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: False

    def init_logger(name: str) -> logging.Logger:
        logger = logging.getLogger(name)
        logger.info_once = logger.warning_once = lambda *_, **__: None  # pyright: ignore
        return logger

    modules = {
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm._custom_ops": {},
        "vllm.logger": {"init_logger": init_logger},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.triton_utils": {"HAS_TRITON": True, "tl": tl, "triton": triton, "tldevice": libdevice},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: "unknown"},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    try:
        for name, attributes in modules.items():
            module = sys.modules[name] = types.ModuleType(name)
            vars(module).update(attributes)
        root = sys.modules["vllm"] = types.ModuleType("vllm")
        vars(root).update(envs=sys.modules["vllm.envs"], _custom_ops=sys.modules["vllm._custom_ops"])
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def load_vllm(folder: Path, *names: str) -> list[Any]:
    """Kernel modules of vLLM (or of a fork of it) in `folder`, which share one set of stand-ins."""
    with vllm_stand_ins():
        sys.modules["vllm"].__path__ = [str(folder / "vllm")]
        return [load(folder, name) for name in names]


class Retuned:
    """A Triton kernel whose meta-parameters, and with them its grid, are replaced at every launch.

    Serves wrappers that fix their launch parameters: assign it over the kernel's name in their module and set
    `meta`.
    """

    def __init__(self, kernel: Any, grid: Any) -> None:
        self.kernel, self.grid = kernel, grid
        self.meta: dict[str, int] = {}

    def __getitem__(self, grid: Any) -> Any:
        del grid

        def launch(*arguments: Any, **keywords: Any) -> Any:
            merged = dict(zip(self.kernel.arg_names, arguments, strict=False)) | keywords | self.meta
            return self.kernel[self.grid(merged)](**merged)

        return launch
