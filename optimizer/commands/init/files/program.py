"""The Pulumi program: the installed gpufleet carries out gpufleet:plan of the stack. `pulumi up` runs this file."""

from infra.__main__ import main

main()
