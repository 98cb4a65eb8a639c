# shellcheck shell=bash
if [[ $* == *--head* ]]; then
  printf 'HTTP/2 403\r\ndate: %s\r\n\r\n' "$(date --utc --date '10 minutes ago' '+%a, %d %b %Y %H:%M:%S GMT')"
  exit 0
fi
