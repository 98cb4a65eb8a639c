# shellcheck shell=bash
until grep -q bootstrap.training.watcher "$CALLS"; do sleep 0.05; done
sleep 0.3
kill -TERM "$1"
