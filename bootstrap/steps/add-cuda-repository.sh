#!/usr/bin/env bash
# Makes apt trust and read NVIDIA's CUDA repository of this Ubuntu release.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if [[ $(dpkg-query --show --showformat '${Version}' cuda-keyring 2>/dev/null || true) == "$CUDA_KEYRING_PIN" ]]; then
  exit 0
fi

case $(uname --machine) in
  x86_64) architecture=x86_64 ;;
  aarch64) architecture=sbsa ;;
  *) die "NVIDIA has no CUDA repository for $(uname --machine)" ;;
esac
release=$(os_release VERSION_ID)
repository=ubuntu${release//./}/$architecture
sum=${CUDA_KEYRING_SHA256[$repository]:-}
[[ -n $sum ]] || die "versions.sh has no checksum of the repository key for $repository"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
download "$CUDA_REPOSITORY_URL/$repository/cuda-keyring_${CUDA_KEYRING_PIN}_all.deb" "$work/cuda-keyring.deb"
assert_sha256 "$work/cuda-keyring.deb" "$sum"
dpkg --install "$work/cuda-keyring.deb"
apt_update
