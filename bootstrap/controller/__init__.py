"""The controller: a function that runs every minute and starts, meters and ends the nodes of one stack.

Standard library and boto3 only, as it runs alone in AWS Lambda.
"""
