#!/usr/bin/env bash
# Order: 70
# Makes sure containers can use the GPUs.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

version=""
if command -v nvidia-ctk >/dev/null; then
  version=$(nvidia-ctk --version | sed --silent 's/.*CLI version \([0-9][0-9.]*\).*/\1/p')
fi
if [[ -n $version ]] && version_at_least "$version" "$CONTAINER_TOOLKIT_MIN"; then
  log "container toolkit $version is there (at least $CONTAINER_TOOLKIT_MIN)"
  exit 0
fi
assert_may_install "the NVIDIA container toolkit" "$version" "$CONTAINER_TOOLKIT_MIN"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
download "$CONTAINER_TOOLKIT_URL/gpgkey" "$work/key"
import_key "$work/key" "$CONTAINER_TOOLKIT_KEY_FINGERPRINT" "$work/keyring"
keyring=$ROOT/usr/share/keyrings/nvidia-container-toolkit.gpg
mkdir -p "$(dirname "$keyring")" "$ROOT/etc/apt/sources.list.d"
gpg --homedir "$work/keyring" --batch --yes --output "$keyring" --export "$CONTAINER_TOOLKIT_KEY_FINGERPRINT"
echo "deb [signed-by=${keyring#"$ROOT"}] $CONTAINER_TOOLKIT_URL/stable/deb/$(dpkg --print-architecture) /" \
  >"$ROOT/etc/apt/sources.list.d/nvidia-container-toolkit.list"
apt_update
packages=()
for name in nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1; do
  packages+=("$name=$CONTAINER_TOOLKIT_PIN")
done
apt_install "${packages[@]}"
if command -v docker >/dev/null; then
  nvidia-ctk runtime configure --runtime=docker
  systemctl restart docker
fi
log "container toolkit $CONTAINER_TOOLKIT_PIN installed and held"
