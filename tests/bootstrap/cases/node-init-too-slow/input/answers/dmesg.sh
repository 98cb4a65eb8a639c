# shellcheck shell=bash
sleep 60
