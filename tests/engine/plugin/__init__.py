"""A resource plugin ``aws`` for Pulumi that hands every call to the real terraform-provider-aws."""
