# shellcheck shell=bash
# The node's watcher dies, as of the kernel's lack of memory; a second one takes its place and sees the notice.
pids="/proc/$1/task/$1/children"
until grep -q bootstrap.training.watcher "$CALLS" && grep -q bootstrap.training.torchrun "$CALLS"; do sleep 0.05; done
sleep 0.5
killed=
until [[ $killed ]]; do # on a busy machine the watcher's process is still the shell that starts it
  for pid in $(<"$pids"); do
    if tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q bootstrap.training.watcher; then kill -KILL "$pid" && killed=1; fi
  done
  sleep 0.05
done
until [[ $(grep -c bootstrap.training.watcher "$CALLS") -ge 2 ]]; do sleep 0.1; done
