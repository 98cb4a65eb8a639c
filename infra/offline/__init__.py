"""Work without an account or the Pulumi CLI: preview a stack, read a stack's export, check the security rules."""
