#!/usr/bin/env bash
# Order: 60
# Makes sure there are EFA driver, libfabric and NCCL plugin on instances with EFA; installs AWS's signed package.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if ((GPUFLEET_EFA_CARDS == 0)); then
  log "no EFA on this instance type"
  exit 0
fi
list=$ROOT/opt/amazon/efa_installed_packages fault=""
version=$(sed --silent 's/.*EFA installer version: \([0-9.]*\).*/\1/p' "$list" 2>/dev/null || true)
# A container brings its own plugin (pull-image.sh).
if [[ -r $list && -z ${GPUFLEET_IMAGE:-} ]]; then fault=$(efa_fault <"$list"); fi
if [[ -n $fault && ${GPUFLEET_AMI_KIND:-} != custom ]]; then
  end_run "$fault: choose another Deep Learning AMI (gpufleet:amiName), or one of your own (gpufleet:amiId)"
fi
if [[ -n $version && -z $fault ]] && version_at_least "$version" "$EFA_INSTALLER_MIN"; then
  log "EFA installer $version has run (at least $EFA_INSTALLER_MIN)"
  exit 0
fi
assert_may_install "the EFA software" "$version" "$EFA_INSTALLER_MIN"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
tarball=aws-efa-installer-$EFA_INSTALLER_PIN.tar.gz
download "$EFA_INSTALLER_URL/aws-efa-installer.key" "$work/key"
download "$EFA_INSTALLER_URL/$tarball" "$work/$tarball"
download "$EFA_INSTALLER_URL/$tarball.sig" "$work/$tarball.sig"
import_key "$work/key" "$EFA_KEY_FINGERPRINT" "$work/keyring"
gpg --homedir "$work/keyring" --batch --verify "$work/$tarball.sig" "$work/$tarball" ||
  die "the signature of $tarball does not verify: not installing it"
tar --extract --gzip --file "$work/$tarball" --directory "$work"
(cd "$work/aws-efa-installer" && ./efa_installer.sh --yes) || die "the EFA installer failed"
modprobe efa || die "the EFA module does not load"
log "EFA $EFA_INSTALLER_PIN installed"
