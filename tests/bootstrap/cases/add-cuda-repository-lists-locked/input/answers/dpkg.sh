# shellcheck shell=bash
# apt-daily.service, which begins before this ends.
"$FAKE_PYTHON" -c 'import fcntl, pathlib, sys, time
lists, state = map(pathlib.Path, sys.argv[1:])
lists.mkdir(parents=True, exist_ok=True)
lock = (lists / "lock").open("w")
fcntl.lockf(lock, fcntl.LOCK_EX)
(state / "locked").touch()
time.sleep(2)
(state / "released").touch()
' "$ROOT/var/lib/apt/lists" "$FAKE_STATE" &
until [[ -e $FAKE_STATE/locked ]]; do sleep 0.05; done
