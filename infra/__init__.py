"""The Pulumi program that carries out a FleetPlan on AWS."""
