"""EKS clusters with their defaults, add-ons, access entries and pod identities, which moto 5.2 does not have.

https://docs.aws.amazon.com/eks/latest/APIReference/API_Operations_Amazon_Elastic_Kubernetes_Service.html
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import unquote

from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.eks import urls
from moto.eks.exceptions import ResourceInUseException, ResourceNotFoundException
from moto.eks.models import EKSBackend
from moto.eks.responses import EKSResponse

from tests.engine.moto_extension.teaching import teach

_create_cluster = EKSResponse.create_cluster
_create_nodegroup = EKSResponse.create_nodegroup
_delete_cluster = EKSResponse.delete_cluster
_tag_resource = EKSBackend.tag_resource


def install() -> None:
    """Put the actions into moto's EKS."""
    for kind in ("addons", "access-entries", "pod-identity-associations"):
        for inner in ("", "/(?P<item>.+)"):
            urls.url_paths[f"{{0}}/clusters/(?P<name>[^/]+)/{kind}{inner}$"] = urls.response.dispatch
    urls.url_paths["{0}/clusters/(?P<name>[^/]+)/updates/(?P<updateId>[^/]+)$"] = urls.response.dispatch
    urls.url_paths["{0}/addons/supported-versions$"] = urls.response.dispatch
    EKSBackend.tag_resource = tag_resource  # type: ignore[method-assign]
    teach(
        EKSResponse,
        create_cluster,
        delete_cluster,
        update_cluster_config,
        create_nodegroup,
        describe_update,
        describe_addon_versions,
        create_addon,
        describe_addon,
        delete_addon,
        create_access_entry,
        describe_access_entry,
        delete_access_entry,
        associate_access_policy,
        list_associated_access_policies,
        disassociate_access_policy,
        create_pod_identity_association,
        describe_pod_identity_association,
        delete_pod_identity_association,
    )


def create_cluster(self: EKSResponse) -> ActionResult:
    """CreateCluster: defaults, and the security group EKS makes for control plane and nodes."""
    result = _create_cluster(self)
    cluster: Any = self.eks_backend.clusters[self._get_param("name")]
    access = self._get_param("accessConfig") or {}
    cluster.access_config = {"authenticationMode": access.get("authenticationMode", "CONFIG_MAP")}
    cluster.upgrade_policy = self._get_param("upgradePolicy") or {"supportType": "EXTENDED"}
    network = cluster.resources_vpc_config
    ec2 = ec2_backends[self.current_account][self.region]
    vpc = ec2.get_subnet(network["subnetIds"][0]).vpc_id
    group = ec2.create_security_group(
        f"eks-cluster-sg-{cluster.name}-{secrets.token_hex(4)}", "EKS created security group", vpc_id=vpc
    )
    # https://docs.aws.amazon.com/eks/latest/userguide/sec-group-reqs.html
    group.add_tags({f"kubernetes.io/cluster/{cluster.name}": "owned", "aws:eks:cluster-name": cluster.name})
    network |= {"vpcId": vpc, "clusterSecurityGroupId": group.id}
    network.setdefault("endpointPublicAccess", True)
    network.setdefault("endpointPrivateAccess", False)
    if network["endpointPublicAccess"]:
        network["publicAccessCidrs"] = network.get("publicAccessCidrs") or ["0.0.0.0/0"]
    return result


def delete_cluster(self: EKSResponse) -> ActionResult:
    """DeleteCluster takes its security group along."""
    cluster = self.eks_backend.clusters.get(self._get_param("name"))
    result = _delete_cluster(self)
    if cluster is not None:
        group = cluster.resources_vpc_config["clusterSecurityGroupId"]
        ec2_backends[self.current_account][self.region].delete_security_group(group_id=group)
    return result


def update_cluster_config(self: EKSResponse) -> ActionResult:
    """UpdateClusterConfig of the network: what the request does not name stays."""
    cluster = self.eks_backend.describe_cluster(name=self._get_param("name"))
    cluster.resources_vpc_config |= self._get_param("resourcesVpcConfig") or {}
    return _updated(secrets.token_hex(8))


def create_nodegroup(self: EKSResponse) -> ActionResult:
    """CreateNodegroup with UpdateConfig, without moto's inventions; a launch template has the disk."""
    result = _create_nodegroup(self)
    cluster = self.eks_backend.clusters[self._get_param("name")]
    nodegroup: Any = cluster.nodegroups[self._get_param("nodegroupName")]
    nodegroup.update_config = self._get_param("updateConfig") or {"maxUnavailable": 1}
    nodegroup.node_repair_config = self._get_param("nodeRepairConfig")
    nodegroup.remote_access = self._get_param("remoteAccess")
    if self._get_param("launchTemplate"):
        nodegroup.disk_size = None
        nodegroup.instance_types = self._get_param("instanceTypes")
        # https://docs.aws.amazon.com/eks/latest/APIReference/API_Nodegroup.html: with an image of one's own
        if not self._get_param("amiType"):
            nodegroup.ami_type = "CUSTOM"
    return result


def describe_update(self: EKSResponse) -> ActionResult:
    """DescribeUpdate: every update is done at once."""
    return _updated(self.path.rsplit("/", 1)[-1])


def _updated(id_: str) -> ActionResult:
    return ActionResult({"update": {"id": id_, "status": "Successful", "type": "ConfigUpdate", "errors": []}})


def _kept(response: EKSResponse, kind: str) -> dict[str, dict[str, Any]]:
    """A cluster's items of ``kind``, by name.

    Raises:
        ResourceNotFoundException: there is no such cluster.
    """
    cluster = response.eks_backend.describe_cluster(name=response.path.split("/")[2])
    kept: dict[str, dict[str, Any]] = cluster.__dict__.setdefault(kind, {})
    return kept


def _find(response: EKSResponse, kind: str, name: str) -> dict[str, Any]:
    try:
        return _kept(response, kind)[name]
    except KeyError:
        raise _missing(f"No {kind} {name} found") from None


def _add(response: EKSResponse, kind: str, name: str, item: dict[str, Any]) -> dict[str, Any]:
    kept = _kept(response, kind)
    if name in kept:
        raise ResourceInUseException(message=f"{kind} {name} already exists")
    cluster = response.path.split("/")[2]
    kept[name] = {
        "clusterName": cluster,
        "createdAt": utcnow(),
        "modifiedAt": utcnow(),
        "tags": response._get_param("tags") or {},
        **item,
    }
    return kept[name]


def _missing(message: str) -> ResourceNotFoundException:
    return ResourceNotFoundException(message=message)


def _arn(response: EKSResponse, resource: str) -> str:
    return f"arn:aws:eks:{response.region}:{response.current_account}:{resource}"


def _by_name(response: EKSResponse, place: int = 4) -> str:
    """Part ``place`` of the path: /clusters/NAME/KIND/ITEM/..."""
    return unquote(response.path).split("/", place)[place]


def tag_resource(self: EKSBackend, resource_arn: str, tags: dict[str, str]) -> None:
    """TagResource, also for the extension's own items."""
    for cluster in self.clusters.values():
        for kind in ("addons", "access_entries", "pod_identities"):
            for item in cluster.__dict__.get(kind, {}).values():
                if resource_arn in (item.get("addonArn"), item.get("accessEntryArn"), item.get("associationArn")):
                    item["tags"] |= tags
                    return
    _tag_resource(self, resource_arn, tags)


def describe_addon_versions(self: EKSResponse) -> ActionResult:
    """DescribeAddonVersions: an older one, which is the default, and a newer one, for every cluster version."""
    cluster = self._get_param("kubernetesVersion")
    versions = [
        {
            "addonVersion": version,
            "architecture": ["amd64", "arm64"],
            "compatibilities": [{"clusterVersion": cluster, "platformVersions": ["*"], "defaultVersion": default}],
        }
        for version, default in (("v1.2.0-eksbuild.1", False), ("v1.1.0-eksbuild.1", True))
    ]
    return ActionResult({"addons": [{"addonName": self._get_param("addonName"), "addonVersions": versions}]})


def create_addon(self: EKSResponse) -> ActionResult:
    """CreateAddon: active at once, and its pod identities with it."""
    name, cluster = self._get_param("addonName"), self.path.split("/")[2]
    identities = [
        _associate(self, "kube-system", item["serviceAccount"], item["roleArn"])
        for item in self._get_param("podIdentityAssociations") or []
    ]
    addon = {
        "addonName": name,
        "addonArn": _arn(self, f"addon/{cluster}/{name}/{secrets.token_hex(8)}"),
        "addonVersion": self._get_param("addonVersion") or "v1.0.0-eksbuild.1",
        "serviceAccountRoleArn": self._get_param("serviceAccountRoleArn"),
        "configurationValues": self._get_param("configurationValues"),
        "podIdentityAssociations": [item["associationArn"] for item in identities],
        "status": "ACTIVE",
    }
    return ActionResult({"addon": _add(self, "addons", name, addon)})


def describe_addon(self: EKSResponse) -> ActionResult:
    """DescribeAddon."""
    return ActionResult({"addon": _find(self, "addons", _by_name(self))})


def delete_addon(self: EKSResponse) -> ActionResult:
    """DeleteAddon takes its pod identities along."""
    addon = _find(self, "addons", _by_name(self))
    for arn in addon["podIdentityAssociations"]:
        _kept(self, "pod_identities").pop(arn.rpartition("/")[2], None)
    return ActionResult({"addon": _kept(self, "addons").pop(addon["addonName"])})


def create_access_entry(self: EKSResponse) -> ActionResult:
    """CreateAccessEntry."""
    principal, cluster = self._get_param("principalArn"), self.path.split("/")[2]
    kind = self._get_param("type") or "STANDARD"
    # https://docs.aws.amazon.com/eks/latest/userguide/access-entries.html: nodes get their user name from EKS
    user = principal if kind == "STANDARD" else "system:node:{{EC2PrivateDNSName}}"
    entry = {
        "principalArn": principal,
        "accessEntryArn": _arn(self, f"access-entry/{cluster}/{secrets.token_hex(8)}"),
        "kubernetesGroups": self._get_param("kubernetesGroups") or ([] if kind == "STANDARD" else ["system:nodes"]),
        "type": kind,
        "username": self._get_param("username") or user,
        "policies": {},
    }
    return ActionResult({"accessEntry": _add(self, "access_entries", principal, entry)})


def describe_access_entry(self: EKSResponse) -> ActionResult:
    """DescribeAccessEntry."""
    return ActionResult({"accessEntry": _find(self, "access_entries", _by_name(self))})


def delete_access_entry(self: EKSResponse) -> ActionResult:
    """DeleteAccessEntry takes its policies along."""
    entry = _find(self, "access_entries", _by_name(self))
    del _kept(self, "access_entries")[entry["principalArn"]]
    return EmptyResult()


def _entry_of_policy(response: EKSResponse) -> dict[str, Any]:
    return _find(response, "access_entries", _by_name(response).partition("/access-policies")[0])


def associate_access_policy(self: EKSResponse) -> ActionResult:
    """AssociateAccessPolicy."""
    entry, policy = _entry_of_policy(self), self._get_param("policyArn")
    entry["policies"][policy] = {
        "policyArn": policy,
        "accessScope": self._get_param("accessScope"),
        "associatedAt": utcnow(),
        "modifiedAt": utcnow(),
    }
    return ActionResult({"associatedAccessPolicy": entry["policies"][policy]})


def list_associated_access_policies(self: EKSResponse) -> ActionResult:
    """ListAssociatedAccessPolicies."""
    return ActionResult({"associatedAccessPolicies": list(_entry_of_policy(self)["policies"].values())})


def disassociate_access_policy(self: EKSResponse) -> ActionResult:
    """DisassociateAccessPolicy."""
    policy = _by_name(self).partition("/access-policies/")[2]
    if _entry_of_policy(self)["policies"].pop(policy, None) is None:
        raise _missing(f"No associated policy {policy} found")
    return EmptyResult()


def create_pod_identity_association(self: EKSResponse) -> ActionResult:
    """CreatePodIdentityAssociation."""
    given = (self._get_param(name) for name in ("namespace", "serviceAccount", "roleArn"))
    return ActionResult({"association": _associate(self, *given)})


def _associate(response: EKSResponse, namespace: str, service_account: str, role_arn: str) -> dict[str, Any]:
    id_, cluster = f"a-{secrets.token_hex(9)[:17]}", response.path.split("/")[2]
    association = {
        "associationId": id_,
        "associationArn": _arn(response, f"podidentityassociation/{cluster}/{id_}"),
        "namespace": namespace,
        "serviceAccount": service_account,
        "roleArn": role_arn,
    }
    return _add(response, "pod_identities", id_, association)


def describe_pod_identity_association(self: EKSResponse) -> ActionResult:
    """DescribePodIdentityAssociation."""
    return ActionResult({"association": _find(self, "pod_identities", _by_name(self))})


def delete_pod_identity_association(self: EKSResponse) -> ActionResult:
    """DeletePodIdentityAssociation."""
    association = _find(self, "pod_identities", _by_name(self))
    return ActionResult({"association": _kept(self, "pod_identities").pop(association["associationId"])})
