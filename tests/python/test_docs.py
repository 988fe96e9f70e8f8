"""The documents say what the code says, where the two can be compared."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_environment_variable_is_documented() -> None:
    sources = [ROOT / "src/base/config.hpp", *(ROOT / "python").rglob("*.py")]
    declared = {name for file in sources for name in re.findall(r'"(EP_\w+)"', file.read_text())}
    documented = set(re.findall(r"`(EP_\w+)`", (ROOT / "docs/environment.md").read_text()))
    assert declared == documented


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
