# shellcheck shell=bash
case "$*" in
  "s3 cp "*) # the wheels, as one archive
    destination=${*: -1}
    scratch=$(mktemp --directory)
    touch "$scratch/torch-2.11.0.whl" "$scratch/pip-26.3-py3-none-any.whl"
    tar --create --file "$destination" --directory "$scratch" .
    exit 0
    ;;
  *" logs put-log-events "*) # keep what was sent
    file=${*: -1}
    cp "${file#file://}" "$FAKE_STATE/log-events.json"
    exit 0
    ;;
  "ecr get-login-password "*)
    echo ecr-password
    exit 0
    ;;
  *"--lifecycle-action-result ABANDON") # the group ends the node
    touch "$FAKE_STATE/terminated"
    exit 0
    ;;
  *" s3api put-object "*) # keep the node's state
    while (($# > 0)); do
      if [[ $1 == --body ]]; then cat "$2" >>"$FAKE_STATE/node-states"; fi
      shift
    done
    exit 0
    ;;
esac
