"""Fixtures of the Python suites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import ranks
from problem import BACKENDS

for name in [name for name in os.environ if name.startswith("EP_")]:
    del os.environ[name]  # what the user has set must not change what is tested


@pytest.fixture(scope="session")
def pool() -> Iterator[ranks.RankPool]:
    """Processes that run rank functions, shared by the whole session."""
    shared = ranks.RankPool()
    yield shared
    shared.close()


@pytest.fixture(params=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Callable[..., list]:
    """Runs a rank function once with threads and once with processes as ranks."""
    if request.param == "threads":
        return ranks.run_threads
    return request.getfixturevalue("pool").run


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend under test: where buffers, and what the tests pass to them, lie by default."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    monkeypatch.setenv("EP_DEVICE", request.param)
    return request.param


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For buffers made without device and time limit: the CPU, unless `backend` follows."""
    monkeypatch.setenv("EP_DEVICE", "cpu")
    monkeypatch.setenv("EP_TIMEOUT_SECS", "30")  # a test that hangs must say so soon
