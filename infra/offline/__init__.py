"""Work without an account or the Pulumi CLI: preview a stack."""
