"""Arguments that pulumi-aws 7 knows and the Terraform provider in use does not.

pulumi-aws 7 follows terraform-provider-aws 6.x, and the provider at hand may be 5.x. An argument listed here is left
out of what that provider sees, so nothing here proves it; any other unknown argument fails Check. A provider that knows
the argument gets it, listed or not.
"""

from __future__ import annotations

NEWER_ARGUMENTS: dict[str, str] = {}
"""``TERRAFORM_TYPE[.nested_block].pulumiArgument`` → why the program needs it and what stands in for the proof."""
