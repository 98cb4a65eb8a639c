# shellcheck shell=bash
for fabric in efa efa-direct; do
  printf "%s\n" "provider: efa" "    fabric: $fabric" "    domain: rdmap16s27-rdm"
done
exit 0
