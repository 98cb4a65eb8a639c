#!/usr/bin/env bash
# Installs Chromium for tests/pages where there is none: Debian's package, as root.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "No Chromium on PATH, and no apt-get as root to install it: tests/pages will be skipped." >&2
  exit 0
fi
echo "Installing Chromium (once) ..."
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
