#!/usr/bin/env bash
# Order: 100
# Unpacks the stack's training code into /opt/gpufleet/train, where the agent starts the command. The archive is named
# by its digest, so every node runs the version that its launch template names.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if [[ -z ${GPUFLEET_TRAIN_ARCHIVE:-} ]]; then
  log "no training code in the bucket: the command uses what the image has"
  exit 0
fi
target=$ROOT/opt/gpufleet/train
archive=s3://$GPUFLEET_BUCKET/$GPUFLEET_TRAIN_ARCHIVE
[[ $GPUFLEET_TRAIN_ARCHIVE =~ /train-([0-9a-f]{64})\.tar\.gz$ ]] ||
  die "GPUFLEET_TRAIN_ARCHIVE is '$GPUFLEET_TRAIN_ARCHIVE'; expected .../train-SHA256.tar.gz"
digest=${BASH_REMATCH[1]}
if [[ $(cat "$target/.sha256" 2>/dev/null || true) == "$digest" ]]; then
  log "the training code is there already"
else
  work=$(mktemp --directory)
  trap 'rm -rf "$work"' EXIT
  retry 5 aws s3 cp --only-show-errors --region "$GPUFLEET_REGION" "$archive" "$work/train.tar.gz" ||
    die "$archive cannot be read"
  sha256sum --check --status <<<"$digest  $work/train.tar.gz" || die "$archive is not the archive its name says"
  tar --extract --gzip --file "$work/train.tar.gz" --directory "$work" --no-same-owner
  rm -rf "$target"
  mv "$work/train" "$target"
  echo "$digest" >"$target/.sha256"
  log "training code $digest unpacked"
fi
set_runtime GPUFLEET_TRAIN_DIR "${target#"$ROOT"}"
