"""Carries the parameters that a stack's training command reads to another stack of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.aws import errors

# Data type of an image's id, which is of one region:
# https://docs.aws.amazon.com/systems-manager/latest/userguide/parameter-store-ec2-aliases.html
IMAGE_TYPE = "aws:ec2:image"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter below a stack's path, decrypted; ``value`` is in no message."""

    name: str  # below the path
    kind: str
    data_type: str
    value: str


def read_parameters(client: Any, path: str) -> list[Parameter]:
    """Read all parameters below a path (ssm:GetParametersByPath on it, kms:Decrypt on its key)."""
    # https://docs.aws.amazon.com/systems-manager/latest/APIReference/API_GetParametersByPath.html
    pages = client.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True, WithDecryption=True)
    return [
        Parameter(
            name=one["Name"].removeprefix(f"{path}/"),
            kind=one["Type"],
            data_type=one.get("DataType", "text"),
            value=one["Value"],
        )
        for page in pages
        for one in page["Parameters"]
    ]


def write_parameters(client: Any, path: str, parameters: Sequence[Parameter], *, key_id: str) -> list[str]:
    """Write parameters below a path, secure ones under the key; leave those that are there; return what was written."""
    written = []
    for one in parameters:
        secure = {"KeyId": key_id} if one.kind == "SecureString" else {}
        try:
            # Standard where the value fits, which is free of charge:
            # https://docs.aws.amazon.com/systems-manager/latest/APIReference/API_PutParameter.html
            client.put_parameter(
                Name=f"{path}/{one.name}", Value=one.value, Type=one.kind, DataType=one.data_type,
                Tier="Intelligent-Tiering", Overwrite=False, **secure,
            )  # fmt: skip
        except Exception as error:
            if not errors.exists_already(error):
                raise
            continue
        written.append(one.name)
    return written
