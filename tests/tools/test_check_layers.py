"""tools/check_layers.py accepts the edges of the layers and names every other one."""

from pathlib import Path

import pytest

from check_layers import check_includes, check_nvrtc, check_torch

HEADERS = (
    "include/deep_ep/error.hpp",
    "src/base/check.hpp",
    "src/base/config.hpp",
    "src/core/ep_plan.hpp",
    "src/os/socket.hpp",
    "src/transport/tcp_bootstrap.hpp",
    "src/jit/jit.hpp",
    "src/backends/ep_backend.hpp",
    "src/backends/registry.hpp",
    "src/backends/cpu/ep.hpp",
    "src/python/bind.hpp",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for header in HEADERS:
        write(tmp_path, header, "#pragma once\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("include/deep_ep/tensor.hpp", "deep_ep/error.hpp"),
        ("src/base/check.cpp", "deep_ep/error.hpp"),
        ("src/core/ep_plan.cpp", "core/ep_plan.hpp"),
        ("src/core/ep_plan.cpp", "base/check.hpp"),
        ("src/transport/tcp_bootstrap.cpp", "os/socket.hpp"),
        ("src/jit/compiler.cpp", "base/config.hpp"),
        ("src/jit/compiler.cpp", "os/socket.hpp"),
        ("src/backends/cpu/ep.cpp", "backends/ep_backend.hpp"),
        ("src/backends/cpu/ep.cpp", "backends/cpu/ep.hpp"),
        ("src/backends/registry.cpp", "backends/cpu/ep.hpp"),
        ("src/buffers/ep_buffer.cpp", "backends/registry.hpp"),
        ("src/python/module.cpp", "python/bind.hpp"),
    ],
)
def test_allowed_include_passes(root: Path, path: str, header: str) -> None:
    write(root, path, f'#include "{header}"\n')
    assert list(check_includes(root)) == []


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("include/deep_ep/tensor.hpp", "base/check.hpp"),
        ("src/base/check.cpp", "core/ep_plan.hpp"),
        ("src/core/ep_plan.cpp", "base/config.hpp"),
        ("src/os/socket.cpp", "transport/tcp_bootstrap.hpp"),
        ("src/transport/tcp_bootstrap.cpp", "core/ep_plan.hpp"),
        ("src/jit/compiler.cpp", "core/ep_plan.hpp"),
        ("src/jit/compiler.cpp", "transport/tcp_bootstrap.hpp"),
        ("src/backends/cpu/ep.cpp", "jit/jit.hpp"),
        ("src/backends/ep_backend.hpp", "backends/cpu/ep.hpp"),
        ("src/buffers/ep_buffer.cpp", "backends/cpu/ep.hpp"),
        ("src/python/module.cpp", "core/ep_plan.hpp"),
        ("examples/moe_layer.cpp", "core/ep_plan.hpp"),
        ("src/new_folder/x.cpp", "deep_ep/error.hpp"),
    ],
)
def test_forbidden_include_is_named(root: Path, path: str, header: str) -> None:
    write(root, path, f'// a comment\n#include "{header}"\n')
    (error,) = check_includes(root)
    assert error.startswith(f"{path}:2: includes {header}: ")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("include/deep_ep/tensor.hpp", "#include <unistd.h>"),
        ("include/deep_ep/tensor.hpp", "#include <cuda_runtime.h>"),
        ("include/deep_ep/tensor.hpp", "#include <Python.h>"),
        ("include/deep_ep/tensor.hpp", "#include <deep_ep/error.hpp>"),
        ("src/core/ep_plan.cpp", "#include <thread>"),
        ("src/core/ep_plan.cpp", "#include <sys/mman.h>"),
        ("src/os/socket.cpp", '#include "socket.hpp"'),
    ],
)
def test_forbidden_header_is_named(root: Path, path: str, line: str) -> None:
    write(root, path, f"{line}\n")
    (error,) = check_includes(root)
    assert error.startswith(f"{path}:1: ")


@pytest.mark.parametrize(
    ("path", "text", "num_errors"),
    [
        ("src/jit/nvrtc.cpp", 'resolve(library, "nvrtcVersion");\n', 0),
        ("src/backends/cpu/ep.cpp", "jit::nvrtc_version();\n", 0),
        ("src/backends/cpu/ep.cpp", "nvrtcVersion(&major, &minor);\n", 1),
        ("src/backends/cpu/ep.cpp", 'dlopen("libnvrtc.so.13", RTLD_NOW);\n', 1),
    ],
)
def test_nvrtc_outside_jit_is_named(root: Path, path: str, text: str, num_errors: int) -> None:
    write(root, path, text)
    assert len(list(check_nvrtc(root))) == num_errors


@pytest.mark.parametrize(
    ("text", "num_errors"),
    [
        ("import torch\n", 1),
        ("from torch.autograd import Function\n", 1),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None\n", 1),
        ("class A:\n    import torch\n", 1),
        ("def f():\n    import torch\n", 0),
        ("from .torch import wrap\n", 0),
        ("if TYPE_CHECKING:\n    import torch\n", 0),
    ],
)
def test_torch_at_top_level_is_named(root: Path, text: str, num_errors: int) -> None:
    write(root, "python/deep_ep/ep.py", text)
    write(root, "python/deep_ep/torch.py", text)
    write(root, "python/deep_ep/demo/model.py", text)
    assert len(list(check_torch(root))) == num_errors
