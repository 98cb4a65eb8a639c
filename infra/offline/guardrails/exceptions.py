"""Exceptions of the guardrails with their reasons, which docs/security.md lists."""

# Sid of a role's statement whose resources do not have this stack's name.
BEYOND_THE_STACK = {
    "UseKeyThroughServices": "the stack's key, whose ARN AWS chooses; only through the services named",
    "SeeNodes": "Describe calls have no resource-level permissions; six, of metadata, prices and scores, in one region",
    "ReserveStarts": "EC2 makes up a reservation's id; only with the stack's tags",
    "TagReservations": "the same reservations, when they are made",
    "EndReservations": "the same reservations",
    "ReadOwnSettings": "the stack's key, whose ARN AWS chooses; only for the controller's own variables",
    "FindPeers": "Describe calls have no resource-level permissions; two, of metadata, in one region",
    "FindFlowLogGroup": "as AWS asks: DescribeLogGroups lists the account's groups; names only",
    "LogInToRegistry": "GetAuthorizationToken takes no resource",
    "LogSessions": "the account's log group, which a person named in gpufleet:sessionLogGroup",
    "FindSessionStreams": "the same log group",
    "FindSessionGroup": "as AWS asks of agents that log sessions; names only",
    "PublishMetrics": "PutMetricData has no resource-level permissions; only into the stack's namespace",
    "PullImage": "the repository of gpufleet:image, which a person named",
    "ReadData": "the prefix of gpufleet:data, which a person named",
    "ListData": "the same prefix",
    "ReadBaseWeights": "the prefix of gpufleet:baseWeights, which a person named",
    "ListBaseWeights": "the same prefix",
    "TakeMessages": "the queue of gpufleet:scaling, which a person named",
    "DecryptMessages": "the key of that queue, which its owner chose; only through SQS",
    "SessionManagerChannels": "channels have no resource-level permissions; without them SSH is the only access",
    "SessionManagerRegisters": "an instance's id is unknown before it runs; its agent reports for that instance only",
}

# Services whose role needs no condition: they name no source, and act only for the account that passed them the role.
# No role can be passed across accounts: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
TRUSTED_WITHOUT_SOURCE = frozenset({"ec2.amazonaws.com", "lambda.amazonaws.com"})

# Sid of an endpoint's statement that lets every principal through.
OPEN_ENDPOINT_STATEMENTS = {
    "ImageLayers": "ECR signs its links to image layers as itself; only reading, only its bucket",
    "ReadAnywhere": "the user asked for a NAT gateway, and much of the internet is kept in S3; only reading",
}
