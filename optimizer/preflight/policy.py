"""Least permissions of the person or pipeline that runs `gpufleet preflight`."""

from __future__ import annotations

from typing import Any

# Calls of all checks. Most take no resource, and the stack's own resources may not exist yet.
_READS = {
    "budgets": "ViewBudget",
    "ec2": "DescribeAddresses DescribeAvailabilityZones DescribeCapacityBlockOfferings "
    "DescribeCapacityReservations DescribeImages DescribeInstanceTypeOfferings DescribeInstanceTypes "
    "DescribeInstances DescribeInternetGateways DescribeNetworkInterfaces DescribePlacementGroups DescribeRegions "
    "DescribeRouteTables DescribeSpotInstanceRequests DescribeSpotPriceHistory DescribeSubnets "
    "DescribeVolumes DescribeVpcAttribute DescribeVpcEndpoints DescribeVpcs GetEbsDefaultKmsKeyId "
    "GetEbsEncryptionByDefault GetSpotPlacementScores",
    "ecr": "BatchGetImage",
    "fsx": "DescribeFileSystems",
    "iam": "GetPolicy",
    "kms": "DescribeKey GetKeyPolicy GetKeyRotationStatus",
    "lambda": "GetAccountSettings",
    "pricing": "GetProducts",
    "s3": "ListAllMyBuckets",
    "servicequotas": "GetAWSDefaultServiceQuota GetServiceQuota",
    "ssm": "GetDocument GetParameter",
    "sts": "GetCallerIdentity",
}


def preflight_policy(partition: str = "aws") -> dict[str, Any]:
    """IAM policy that allows the calls of all checks and nothing else."""
    reads = [f"{service}:{action}" for service, actions in _READS.items() for action in actions.split()]
    bucket = f"arn:{partition}:s3:::gpufleet-*"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Sid": "GpufleetPreflight", "Effect": "Allow", "Action": reads, "Resource": "*"},
            {"Sid": "GpufleetPreflightBucket", "Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket},
        ],
    }
