"""Behaviour of AWS that moto lacks or invents and the program's resources need; see README.md."""

from __future__ import annotations

from tests.engine.moto_extension import (
    activities,
    auto_scaling,
    auto_scaling_launches,
    bucket_policies,
    budgets,
    capacity_reservations,
    file_systems,
    instance_refreshes,
    instances,
    lambda_functions,
    launch_templates,
    lifecycle,
    log_events,
    machine_images,
    nat_gateways,
    parameters,
    placement_groups,
    queues,
    reserved_launches,
    security_groups,
)


def install() -> None:
    """Extend the moto of this process, which serves nothing else."""
    for module in (
        activities,
        auto_scaling,
        auto_scaling_launches,
        bucket_policies,
        budgets,
        capacity_reservations,
        file_systems,
        instance_refreshes,
        instances,
        lambda_functions,
        launch_templates,
        lifecycle,
        log_events,
        machine_images,
        nat_gateways,
        parameters,
        placement_groups,
        queues,
        reserved_launches,
        security_groups,
    ):
        module.install()
