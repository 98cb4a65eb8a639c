#!/usr/bin/env bash
# Order: 100
# The clock is synchronised, and right: leases, signatures of AWS requests and logs of several nodes depend on it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
require_env GPUFLEET_REGION

while [[ $(timedatectl show --property=NTPSynchronized --value) != yes ]]; do
  ((SECONDS < TIME_SYNC_TIMEOUT_S)) || die "the clock is not synchronised after $TIME_SYNC_TIMEOUT_S s; chronyc sources"
  sleep 1
done

# The source of time may be wrong. AWS refuses signatures that are minutes off:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/signature-v4-troubleshooting.html
# S3 answers anyone with its own time, a refusal too:
# https://docs.aws.amazon.com/AmazonS3/latest/API/RESTCommonResponseHeaders.html
answer=$(curl --silent --head --max-time 5 "https://s3.$GPUFLEET_REGION.amazonaws.com/" || true)
told=$(sed -n 's/^date: //Ip' <<<"$answer" | tr -d '\r')
if [[ -z $told ]]; then
  log "S3 does not tell the time; the clock is compared with nothing"
  exit 0
fi
ahead_s=$(($(date +%s) - $(date --date "$told" +%s)))
((ahead_s >= -CLOCK_LIMIT_S && ahead_s <= CLOCK_LIMIT_S)) ||
  die "the clock is $ahead_s s ahead of S3's, more than $CLOCK_LIMIT_S s off; chronyc sources"
