# shellcheck shell=bash
if [[ $* == *"pip install"* ]]; then exit 1; fi
