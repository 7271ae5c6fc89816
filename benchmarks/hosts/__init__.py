"""Hosts and racks on one machine, with links of limited rate. See docs/testbed.md."""

from hosts.hosts import Failure, Hosts, Outcome
from hosts.links import LinkTraffic, bits_per_s, own_traffic
from hosts.namespaces import why_impossible
from hosts.utilisation import write_page

__all__ = ["Failure", "Hosts", "LinkTraffic", "Outcome", "bits_per_s", "own_traffic", "why_impossible", "write_page"]
