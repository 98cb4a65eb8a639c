# shellcheck shell=bash
sleep 1
