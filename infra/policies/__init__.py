"""Every policy document of the stack, as plain data, with the reason for each permission and each "*"."""
