# shellcheck shell=bash
for card in 16s27 32s27 144s27 160s27; do
  printf '%s\n' "provider: efa" "    fabric: efa" "    domain: rdmap$card-rdm" "    version: 203.0" \
    "    type: FI_EP_RDM" "    protocol: FI_PROTO_EFA"
done
exit 0
