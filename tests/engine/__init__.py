"""The real Pulumi engine and the real AWS provider, against an emulated AWS; see README.md."""
