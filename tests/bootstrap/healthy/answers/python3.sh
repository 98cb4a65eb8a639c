# shellcheck shell=bash
if [[ $1 == -m && $2 == venv ]]; then
  mkdir -p "$3/bin"
  cp "$FAKE_HEALTHY/venv-python3" "$3/bin/python3"
  exit 0
fi
exec "$FAKE_PYTHON" "$@"
