#!/usr/bin/env bash
# Order: 70
# Every EFA card of the plan is usable from libfabric and by NCCL: no silent fall-back to TCP or to fewer cards.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if ((GPUFLEET_EFA_CARDS == 0)); then exit 0; fi
# "domain: rdmap16s27-rdm", at least once a card (libfabric 2 has two fabrics); an error without a card:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
answer=$(fi_info -p efa -t FI_EP_RDM) || die "libfabric finds no EFA card; NCCL would fall back to TCP"
cards=$(sed --silent --expression 's/-rdm$//' --expression 's/^ *domain: *//p' <<<"$answer" | sort --unique | wc --lines)
((cards == GPUFLEET_EFA_CARDS)) || die "$cards EFA cards are usable, the plan counts on $GPUFLEET_EFA_CARDS"

# Without the plugin NCCL does not use EFA, and says so only in its debug output.
plugin=$(find "$ROOT/opt/amazon" "$ROOT/opt/aws-ofi-nccl" -name 'libnccl-net*.so*' 2>/dev/null | head -n 1 || true)
[[ -n $plugin ]] || die "the aws-ofi-nccl plugin is missing; NCCL would fall back to TCP"
log "$cards EFA cards, plugin ${plugin#"$ROOT"}"
