# shellcheck shell=bash
if [[ $* == "s3 cp "*/bootstrap/train-* ]]; then
  scratch=$(mktemp --directory)
  mkdir "$scratch/train"
  echo "print()" >"$scratch/train/train.py"
  tar --create --gzip --file "${*: -1}" --directory "$scratch" train
  exit 0
fi
