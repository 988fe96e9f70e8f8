#!/usr/bin/env python3
"""Reads the JUnit files of CTest and pytest; prints what failed, what was skipped and why.

The last line is `N passed, N failed, N skipped`. Exits 1 if a test failed or none ran.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def skip_reason(case: ElementTree.Element) -> str:
    """Why a test was skipped: what GoogleTest printed, otherwise what the file says."""
    printed = case.findtext("system-out") or ""
    found = re.search(r": Skipped\n(.*?)\n*\[  SKIPPED \]", printed, re.DOTALL)
    if found and found[1].strip():
        return " ".join(found[1].split())
    skipped = case.find("skipped")
    message = skipped.get("message", "") if skipped is not None else ""
    # CTest's own word for a skip says nothing.
    return "no reason given" if message in ("", "SKIP_REGULAR_EXPRESSION_MATCHED") else message


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def full_name(case: ElementTree.Element) -> str:
    name, suite = case.get("name", "?"), case.get("classname", "")
    return name if suite in ("", name) else f"{suite}.{name}"


def without_parameters(name: str) -> str:
    """The test of a case: `Suite.Test/case # ...` of GoogleTest, `test[case]` of pytest."""
    return re.sub(r"(\.\w+)/\S+.*$|\[.*\]$", r"\1", name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="junit.xml")
    files = parser.parse_args().files

    counts: Counter[str] = Counter()
    failed: list[str] = []
    skipped: dict[str, list[str]] = {}
    for file in files:
        if not file.is_file():
            failed.append(f"{file}: not written: the run ended early")
            continue
        for case in ElementTree.parse(file).iter("testcase"):
            result = outcome(case)
            counts[result] += 1
            name = f"{file.stem}: {full_name(case)}"
            if result == "failed":
                failed.append(name)
            elif result == "skipped":
                skipped.setdefault(skip_reason(case), []).append(name)

    for reason, names in skipped.items():
        print(f"skipped: {reason}")
        for test, number in Counter(map(without_parameters, names)).items():
            print(f"    {test}" + (f" ({number} cases)" if number > 1 else ""))
    for name in failed:
        print(f"failed: {name}")
    print(", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped")))
    return 1 if failed or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
