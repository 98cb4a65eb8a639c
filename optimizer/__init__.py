"""From a model, a budget and a deadline to a FleetPlan."""
