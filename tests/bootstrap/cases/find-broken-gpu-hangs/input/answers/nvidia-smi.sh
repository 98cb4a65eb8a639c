# shellcheck shell=bash
setsid sleep 125 & # longer than a case may take; it gets no signal of timeout's
sleep 125
