#!/usr/bin/env bash
# Order: 100
# The clock is synchronised: leases, signatures of AWS requests and logs of several nodes depend on it.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

while [[ $(timedatectl show --property=NTPSynchronized --value) != yes ]]; do
  ((SECONDS < TIME_SYNC_TIMEOUT_S)) || die "the clock is not synchronised after $TIME_SYNC_TIMEOUT_S s; chronyc sources"
  sleep 1
done
