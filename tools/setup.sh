#!/usr/bin/env bash
# Brings a fresh Debian 12 or Ubuntu 24.04 machine to where `make` can build, and does nothing
# where all is there already.
#
#   tools/setup.sh            system packages, and .venv with the pinned tools
#   tools/setup.sh system P…  the system packages P… alone
set -euo pipefail
cd "$(dirname "$0")/.."

readonly kSystemPackages=(g++ cmake make ninja-build python3-venv python3-dev libhwy-dev libgtest-dev
  libasio-dev pkg-config)

install_system_packages() {
  if ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here: install what these Debian packages hold yourself: $*" >&2
    return 0
  fi
  local package missing=() root=()
  for package in "$@"; do
    [[ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" == *" installed" ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  echo "setup: installing ${missing[*]}"
  ((EUID == 0)) || root=(sudo)
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

create_environment() {
  local stamp=.venv/.requirements
  cmp -s tools/requirements.txt "$stamp" && return 0
  [[ -x .venv/bin/pip ]] || "${PYTHON:-python3}" -m venv .venv
  echo "setup: installing the pinned Python tools into .venv"
  .venv/bin/pip install --quiet --disable-pip-version-check -r tools/requirements.txt
  cp tools/requirements.txt "$stamp"
}

if [[ "${1:-}" == system ]]; then
  install_system_packages "${@:2}"
else
  install_system_packages "${kSystemPackages[@]}"
  create_environment
fi
