# shellcheck shell=bash
until grep -q bootstrap.training.torchrun "$CALLS"; do sleep 0.05; done
sleep 0.3
kill -TERM "$1"
sleep 0.1
kill -TERM "$1"
