# shellcheck shell=bash
if grep --quiet "bootstrap.smoke" "$FAKE_CALLS"; then
  echo "[  99.0] NVRM: Xid (PCI:0000:10:1c): 48, Double Bit ECC Error"
  exit 0
fi
