"""Tencent Cloud: prices of mainland China from its documentation, in ../data/."""

from optimizer.clouds.cloud import Cloud

CLOUD = Cloud(name="tencent", title="Tencent Cloud", place=2)
