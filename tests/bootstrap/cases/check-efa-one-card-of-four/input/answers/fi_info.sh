# shellcheck shell=bash
printf "%s\n" "provider: efa" "    fabric: efa" "    domain: rdmap16s27-rdm" "    type: FI_EP_RDM"
exit 0
