"""FSx for Lustre file systems with what AWS adds to the request, and their data repository associations.

Everything is available at once. https://docs.aws.amazon.com/fsx/latest/APIReference/API_FileSystem.html
https://docs.aws.amazon.com/fsx/latest/APIReference/API_DataRepositoryAssociation.html
"""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4

from moto.core.exceptions import JsonRESTError
from moto.ec2.models import ec2_backends
from moto.fsx.exceptions import FileSystemNotFound
from moto.fsx.models import FileSystem, FSxBackend
from moto.fsx.responses import FSxResponse

from tests.engine.moto_extension.teaching import teach

_to_dict, _create = FileSystem.to_dict, FSxBackend.create_file_system
# Defaults of a file system.
_DEFAULTS = {"DataCompressionType": "NONE", "CopyTagsToBackups": False, "WeeklyMaintenanceStartTime": "1:05:00"}


def install() -> None:
    """Put the methods into moto's FSx."""
    FileSystem.to_dict = to_dict  # type: ignore[method-assign]
    FSxBackend.create_file_system = create_file_system  # type: ignore[assignment, method-assign]
    teach(
        FSxResponse,
        describe_file_systems,
        create_data_repository_association,
        describe_data_repository_associations,
        delete_data_repository_association,
    )


def create_file_system(self: Any, **given: Any) -> FileSystem:
    """Keep the version, the time and the VPC too."""
    made: Any = _create(self, **given)
    subnet = ec2_backends[self.account_id][self.region_name].get_subnet(made.subnet_ids[0])
    made.more = {
        "CreationTime": time.time(),
        "OwnerId": self.account_id,
        "VpcId": subnet.vpc_id,
        "FileSystemTypeVersion": given["file_system_type_version"],
        "Lifecycle": "AVAILABLE",
        "NetworkInterfaceIds": [f"eni-{uuid4().hex[:17]}"],
    }
    made.lustre_configuration = {**_DEFAULTS, **made.lustre_configuration, "MountName": uuid4().hex[:8]}
    return made  # type: ignore[no-any-return]


def to_dict(self: Any) -> dict[str, Any]:
    """Describe a file system."""
    return {**_to_dict(self), **self.more}


def describe_file_systems(self: Any) -> str:
    """Describe the file systems that are named, which must be there, or all."""
    kept, wanted = self.fsx_backend.file_systems, json.loads(self.body).get("FileSystemIds")
    for name in wanted or ():
        if name not in kept:
            raise FileSystemNotFound(name)
    return json.dumps({"FileSystems": [kept[name].to_dict() for name in wanted or kept]})


def _associations(self: Any) -> dict[str, dict[str, Any]]:
    return self.fsx_backend.__dict__.setdefault("associations", {})  # type: ignore[no-any-return]


def create_data_repository_association(self: Any) -> str:
    """Link a folder of a file system to a prefix of a bucket."""
    given = json.loads(self.body)
    tags, system = given.pop("Tags", []), self.fsx_backend.file_systems[given["FileSystemId"]]
    name = f"dra-{uuid4().hex[:17]}"
    arn = system.resource_arn.replace(":file-system/", ":association/") + f"/{name}"
    made = {key: value for key, value in given.items() if key != "ClientRequestToken"} | {
        "AssociationId": name,
        "ResourceARN": arn,
        "Lifecycle": "AVAILABLE",
        "ImportedFileChunkSize": given.get("ImportedFileChunkSize", 1024),
        "CreationTime": time.time(),
    }
    self.fsx_backend.tagger.tag_resource(arn, tags)
    _associations(self)[name] = made
    return json.dumps({"Association": {**made, "Tags": tags}})


def describe_data_repository_associations(self: Any) -> str:
    """Describe the associations that are named, which must be there, or all."""
    kept, wanted = _associations(self), json.loads(self.body).get("AssociationIds")
    for name in wanted or ():
        if name not in kept:
            raise JsonRESTError("DataRepositoryAssociationNotFound", f"Association '{name}' does not exist.")
    tags_of = self.fsx_backend.tagger.list_tags_for_resource
    found = [{**kept[name], **tags_of(kept[name]["ResourceARN"])} for name in wanted or kept]
    return json.dumps({"Associations": found})


def delete_data_repository_association(self: Any) -> str:
    """Unlink a folder."""
    given = json.loads(self.body)
    del _associations(self)[given["AssociationId"]]
    return json.dumps({**given, "Lifecycle": "DELETING"})
