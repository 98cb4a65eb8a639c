# shellcheck shell=bash
if [[ $* == *"/latest/meta-data/autoscaling/target-lifecycle-state" ]]; then
  cat >/dev/null
  echo -n Warmed:Stopped
  exit 0
fi
