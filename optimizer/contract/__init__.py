"""Ground floor of the optimizer, shared with infra: request, plan, hardware words, errors, units, spelling."""
