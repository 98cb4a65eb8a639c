"""Platform eks: the cluster around the fleet, and the manifests of its training job."""
