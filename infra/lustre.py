"""The file system of the training data, where the plan has one: FSx for Lustre, linked to gpufleet:data in S3."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.component import Component, Stack
from infra.network import Network
from infra.security import Security
from optimizer.contract.plan import LUSTRE_MB_PER_S_PER_TIB

# The provider waits 10 minutes for an association, whose deletion took 8 to 10 (read in public notes, 2026-11-23).
TIMEOUTS = pulumi.CustomTimeouts(create="60m", delete="60m")


class Lustre(Component):
    """A file system that shows the objects of gpufleet:data as files, and reads each from S3 when it is first read.

    ``address`` is what nodes mount. Nothing is written back: the association has no export.
    """

    def __init__(self, stack: Stack, network: Network, security: Security) -> None:
        # The file system's servers talk to each other and to the nodes by the rules of the nodes' group.
        super().__init__(stack, pulumi.ResourceOptions(depends_on=[security]))
        assert stack.settings.plan.lustre
        name = f"{self._prefix}-data"
        options = pulumi.ResourceOptions(parent=self, custom_timeouts=TIMEOUTS)
        system = aws.fsx.LustreFileSystem(
            name,
            # Persistent types take the stack's key and replace a file server that fails under a run; scratch types do
            # neither: https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-fsx-lustre.html
            # https://docs.aws.amazon.com/fsx/latest/LustreGuide/encryption-at-rest.html
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            # AWS recommends it for new file systems (API_CreateFileSystem.html); the default is older.
            file_system_type_version="2.15",
            storage_capacity=stack.settings.plan.lustre.storage_gib,
            per_unit_storage_throughput=LUSTRE_MB_PER_S_PER_TIB,
            subnet_ids=network.subnets[network.own_zones[0]],
            # Ports 988 and 1018 to 1023 between servers and clients; members of the nodes' group reach each other:
            # https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
            security_group_ids=[security.node_group_id],
            kms_key_id=security.key_arn,
            # A linked file system can have no backups; S3 has the data.
            automatic_backup_retention_days=0,
            tags=self._named(name),
            opts=options,
        )
        association = aws.fsx.DataRepositoryAssociation(
            name,
            file_system_id=system.id,
            file_system_path="/",
            data_repository_path=f"{self._settings.data.rstrip('/')}/",
            batch_import_meta_data_on_create=True,
            tags=self._named(name),
            opts=options,
        )
        # https://docs.aws.amazon.com/fsx/latest/LustreGuide/mounting-ec2-instance.html
        self.address = pulumi.Output.all(system.dns_name, system.mount_name, association.id).apply(
            lambda known: f"{known[0]}@tcp:/{known[1]}"
        )
        self.register_outputs({"address": self.address})
