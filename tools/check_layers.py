#!/usr/bin/env python3
"""Fails on an include or import that the layers of this library do not allow.

Every source file belongs to the first rule that its path matches. The rule lists what the file may
include besides its own folder. Adding a folder means adding a rule here.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

INCLUDE_ROOTS = ("include", "src", "kernels")
"""Where `#include "core/x.hpp"` is looked up; the compiler gets the same folders."""

CPP_SUFFIXES = {".cpp", ".hpp", ".cuh"}

INTERFACES = "src/backends/*.hpp"
"""What a backend is, and the registry; `*` stops at a slash, so no concrete backend matches."""

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("include/**", ()),
    ("src/base/**", ("include/**",)),
    ("src/core/**", ("include/**", "src/base/check.hpp")),
    ("src/os/**", ("include/**", "src/base/**")),
    ("src/transport/**", ("include/**", "src/base/**", "src/os/**")),
    ("src/jit/**", ("include/**", "src/base/**", "src/os/**")),
    (
        "src/backends/cpu/**",
        ("include/**", "src/base/**", "src/core/**", "src/os/**", "src/transport/**", INTERFACES),
    ),
    (
        "src/backends/cuda/**",
        (
            *("include/**", "kernels/deep_ep/abi/**", "src/base/**", "src/core/**", "src/os/**"),
            *("src/transport/**", "src/jit/jit.hpp", INTERFACES),
        ),
    ),
    ("kernels/deep_ep/abi/**", ()),
    ("kernels/deep_ep/device/**", ("kernels/deep_ep/abi/**",)),
    ("kernels/deep_ep/*.cuh", ("kernels/deep_ep/abi/**", "kernels/deep_ep/device/**")),
    ("src/backends/registry.cpp", ("include/**", "src/base/**", "src/backends/**")),
    (
        "src/backends/*.hpp",
        ("include/**", "src/base/**", "src/core/**", "src/os/**", "src/transport/**"),
    ),
    (
        "src/backends/*.cpp",
        ("include/**", "src/base/**", "src/core/**", "src/os/**", "src/transport/**", INTERFACES),
    ),
    (
        "src/buffers/**",
        (
            "include/**",
            "src/base/**",
            "src/core/**",
            "src/transport/**",
            "src/backends/ep_backend.hpp",
            "src/backends/registry.hpp",
        ),
    ),
    ("src/python/**", ("include/**",)),
    ("examples/**", ("include/**",)),
)

IMPURE_HEADERS = {
    *("atomic", "barrier", "condition_variable", "future", "latch", "mutex", "semaphore"),
    *("shared_mutex", "stop_token", "thread", "chrono", "ctime", "random"),
    *("filesystem", "fstream", "iostream"),
}
"""Threads, clocks and files: src/core gives the same output for the same input without them."""

NVRTC_FOLDER = "src/jit/"
"""The one folder that calls NVRTC; the rest asks it for cubins."""

TORCH_MODULES = ("torch.py", "autograd.py", "buffers/legacy*.py", "demo/**", "bench/**")
"""Files of python/deep_ep that only a program with torch imports, so they may need it at once."""


@dataclass(frozen=True)
class Include:
    line: int
    name: str
    quoted: bool


def matches(path: str, pattern: str) -> bool:
    """Whether `path` matches: `/**` is everything below a folder, `*` stays within one."""
    if pattern.endswith("/**"):
        return path.startswith(pattern[:-2])
    return fnmatchcase(path, pattern) and path.count("/") == pattern.count("/")


def read_includes(text: str) -> Iterator[Include]:
    """The include lines of a C++ source."""
    for line, content in enumerate(text.splitlines(), start=1):
        found = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', content)
        if found:
            yield Include(line, found[2], quoted=found[1] == '"')


def resolve(root: Path, name: str) -> str | None:
    """The path from the root of what `#include "name"` reaches, None if it is not ours."""
    for folder in INCLUDE_ROOTS:
        if (root / folder / name).is_file():
            return f"{folder}/{name}"
    return None


def why_not(path: str, include: Include, root: Path) -> str | None:
    """What is wrong with this include in the file `path`; None if nothing is."""
    target = resolve(root, include.name)
    if not include.quoted:
        if target:
            return "our own header: write it in quotes"
        is_standard = re.fullmatch(r"[a-z_]+", include.name) is not None
        if matches(path, "include/**") and not is_standard:
            return "a public header includes the C++ standard library and deep_ep/ only"
        if matches(path, "src/core/**"):
            is_highway = include.name.startswith("hwy/")
            if include.name in IMPURE_HEADERS or not (is_standard or is_highway):
                return "src/core is pure: no operating system, threads, clock or files"
        return None
    if target is None:
        return "not found below include/ or src/: quotes and a path from there are for our headers"
    allowed = next((allowed for pattern, allowed in LAYERS if matches(path, pattern)), None)
    if allowed is None:
        return "no rule for this file: add its folder to LAYERS in tools/check_layers.py"
    own_folder = f"{Path(path).parent.as_posix()}/*"
    if any(matches(target, pattern) for pattern in (*allowed, own_folder)):
        return None
    return f"it may include only its own folder{''.join(f', {pattern}' for pattern in allowed)}"


def check_includes(root: Path) -> Iterator[str]:
    """One line for each forbidden include below `root`."""
    for folder in (*INCLUDE_ROOTS, "examples"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in CPP_SUFFIXES:
                continue
            path = file.relative_to(root).as_posix()
            for include in read_includes(file.read_text(encoding="utf-8")):
                reason = why_not(path, include, root)
                if reason:
                    yield f"{path}:{include.line}: includes {include.name}: {reason}"


def check_nvrtc(root: Path) -> Iterator[str]:
    """One line for each name of NVRTC's interface that is used outside src/jit."""
    for folder in (*INCLUDE_ROOTS, "examples"):
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix not in CPP_SUFFIXES or path.startswith(NVRTC_FOLDER):
                continue
            for line, content in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                if found := re.search(r"\bnvrtc[A-Z]\w+|\blibnvrtc\b", content):
                    yield f"{path}:{line}: uses {found[0]}: only {NVRTC_FOLDER} calls NVRTC"


def imports_at_top(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and module of every import that runs when the module is imported."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imports_at_top(node.orelse)
            case _:
                for field in ("body", "handlers", "orelse", "finalbody"):
                    yield from imports_at_top(getattr(node, field, []))


def check_torch(root: Path) -> Iterator[str]:
    """One line for each import of torch that `import deep_ep` could run into."""
    package = root / "python" / "deep_ep"
    for file in sorted(package.rglob("*.py")):
        module_path = file.relative_to(package).as_posix()
        if any(matches(module_path, pattern) for pattern in TORCH_MODULES):
            continue
        for line, module in imports_at_top(ast.parse(file.read_text(encoding="utf-8")).body):
            if module.split(".")[0] == "torch":
                path = file.relative_to(root).as_posix()
                yield (
                    f"{path}:{line}: imports torch at top level: import it in the function that "
                    "needs it, or add the file to TORCH_MODULES in tools/check_layers.py"
                )


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    errors = [*check_includes(root), *check_nvrtc(root), *check_torch(root)]
    for error in errors:
        print(error, file=sys.stderr)
    print(f"layers: {len(errors)} errors" if errors else "layers: ok")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
