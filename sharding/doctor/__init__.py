"""`warren doctor`: can this machine use this cluster, and if not, how to fix it.

`findings` and `roles` are pure. It may import everything but `inspection` and `cli`.
"""

from sharding.doctor.checks import examine
from sharding.doctor.findings import Finding, Verdict
from sharding.doctor.reach import Place, places_from
from sharding.doctor.roles import Role

__all__ = ["Finding", "Place", "Role", "Verdict", "examine", "places_from"]
