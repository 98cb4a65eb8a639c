"""The search: every instance type, purchase and node count with its fastest layout, priced and ranked."""
