"""The controller, a Lambda function that starts, meters and ends a stack's nodes. Standard library and boto3 only."""
