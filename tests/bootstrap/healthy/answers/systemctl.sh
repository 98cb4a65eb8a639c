# shellcheck shell=bash
case "$*" in
  "cat dlami-nvme.service") exit 1 ;;
  "is-active --quiet "*) grep --quiet --line-regexp --fixed-strings -- "${*: -1}" "$FAKE_STATE/services" && exit 0 || exit 3 ;;
  "enable --now "*) printf '%s\n' "${*: -1}" >>"$FAKE_STATE/services" ;;
esac
exit 0
