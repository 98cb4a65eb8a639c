"""Ledger: the run's append-only record of every second and dollar.

Each event closes the time since the event before it, so the categories add up to the wall time:

    event       category of the time that it closes
    start       a gap with no process: restart on the same boot of a machine, idle on another
    train       restart: imports, rendezvous, loading a checkpoint
    progress    training of the steps since the last mark: useful, or lost once a later train event rolls them back
    stall       checkpoint: training stood still for one
    stop, done  checkpoint: the final save
    failed      lost: a step that did not complete
    commit      none; the event tells which step is saved

A progress event brings the newest reported loss, once, with its step.

A killed process writes no last event; its work after its last mark (a second or one step) counts as restart.
"""

PRICE_VARIABLE = "GPUFLEET_PRICE_USD_PER_HOUR"
