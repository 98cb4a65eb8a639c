#!/usr/bin/env bash
# Order: 80
# No GPU is slowed down by heat or power while it is idle.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

answer=$(query_gpus index,clocks_event_reasons.hw_slowdown,clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.hw_power_brake_slowdown,clocks_event_reasons.sw_thermal_slowdown)
bad=0
while IFS=, read -r gpu reasons; do
  # "Not Active" also holds the word.
  case ", ${reasons# }," in
    *", Active,"*)
      log "FAIL GPU $gpu is slowed down (hardware, hardware thermal, power brake, software thermal): $reasons"
      bad=1
      ;;
  esac
done <<<"$answer"
exit "$bad"
