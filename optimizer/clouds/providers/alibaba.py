"""Alibaba Cloud: prices as recorded from its price list, in ../data/."""

from optimizer.clouds.cloud import Cloud

CLOUD = Cloud(name="alibaba", title="Alibaba Cloud", place=3)
