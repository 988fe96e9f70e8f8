#!/usr/bin/env bash
# Formats C++ and Python in place; with --check it changes nothing and fails where it would.
set -euo pipefail
cd "$(dirname "$0")/.."

folders=()
for folder in include src tests examples bench; do
  [[ -d "$folder" ]] && folders+=("$folder")
done
mapfile -t sources < <(find "${folders[@]}" -name '*.cpp' -o -name '*.hpp' | sort)

clang_format=(.venv/bin/clang-format -i)
ruff_format=(.venv/bin/ruff format --quiet)
ruff_check=(.venv/bin/ruff check --quiet --fix)
if [[ "${1:-}" == --check ]]; then
  clang_format=(.venv/bin/clang-format --dry-run --Werror)
  ruff_format=(.venv/bin/ruff format --quiet --diff)
  ruff_check=(.venv/bin/ruff check --quiet)
fi

status=0
((${#sources[@]} == 0)) || "${clang_format[@]}" "${sources[@]}" || status=1
"${ruff_format[@]}" . || status=1
"${ruff_check[@]}" . || status=1
exit "$status"
