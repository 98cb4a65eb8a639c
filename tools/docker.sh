#!/usr/bin/env bash
# Unpacks Debian's or Ubuntu's docker into .tools/docker for tests/training/test_container.py where there is none. Nothing is
# installed or started on the machine: the test starts a daemon of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

if command -v dockerd >/dev/null || [[ -x .tools/docker/usr/sbin/dockerd ]]; then exit 0; fi
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "No dockerd on PATH, and no apt-get as root to fetch it: test_container.py will be skipped." >&2
  exit 0
fi
echo "Unpacking docker into .tools/docker (once) ..."
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
chmod 0755 "$work" # apt's downloads run as a user of their own
apt-get update -qq
(cd "$work" && apt-get download -qq docker.io containerd runc tini >/dev/null 2>&1)
mkdir -p .tools/docker
for package in "$work"/*.deb; do dpkg --extract "$package" .tools/docker; done
