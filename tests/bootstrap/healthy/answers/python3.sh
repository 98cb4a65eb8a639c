# shellcheck shell=bash
if [[ $1 == -m && $2 == venv ]]; then
  mkdir -p "${*: -1}/bin"
  cp "$FAKE_HEALTHY/venv-python3" "${*: -1}/bin/python3"
  exit 0
fi
# The watcher of notices is the real one where a test has a metadata service. This one sees what the group does with a
# node that was abandoned (aws.sh).
if [[ $1 == -m && $2 == bootstrap.training.watcher && -z ${AWS_EC2_METADATA_SERVICE_ENDPOINT:-} ]]; then
  until [[ -e $FAKE_STATE/terminated ]]; do sleep 0.1; done
  mkdir -p "$(dirname "$3")"
  echo "4102444800 autoscaling/target-lifecycle-state (Terminated)" >"$3"
  exit 0
fi
exec "$FAKE_PYTHON" "$@"
