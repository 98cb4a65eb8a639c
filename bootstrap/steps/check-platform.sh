#!/usr/bin/env bash
# Order: 10
# Ends unless this machine is what the other steps expect: Ubuntu, root, tools.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

[[ $(id --user) == 0 ]] || die "node_init.sh runs as root"

release="$(os_release ID) $(os_release VERSION_ID)"
case $release in
  "ubuntu 22.04" | "ubuntu 24.04") ;;
  *) end_run "this is \"$release\"; the steps are written for Ubuntu 22.04 and 24.04" ;;
esac

for tool in aws curl python3 flock timeout setsid gpg; do
  command -v "$tool" >/dev/null || die "$tool is not installed; user data needs aws and curl itself"
done
