"""Which policies are published, who may use which, and when nobody needs one any more. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from src.core.types import PolicyVersion, RequestKey, RequestKind


class PolicyVersions:
    """Published policies with the checksums of their weights.

    Args:
        keep: policies that are never retired, counted from the newest.
    """

    def __init__(self, keep: int) -> None:
        if keep < 2:
            raise ValueError(f"keep_versions must be at least 2, got {keep}: EXPLORE may be one behind")
        self._keep = keep
        self._checksums: dict[PolicyVersion, str] = {}  # oldest first

    @property
    def newest(self) -> PolicyVersion | None:
        return next(reversed(self._checksums), None)

    def publish(self, version: PolicyVersion, checksum: str) -> None:
        """Raises ValueError if it is not newer than all others."""
        self.check_newer(version)
        self._checksums[version] = checksum

    def check_newer(self, version: PolicyVersion) -> None:
        """Raises ValueError if `version` is not newer than all published ones."""
        if self.newest is not None and version <= self.newest:
            raise ValueError(f"policy {version} is not newer than the published {self.newest}")

    def checksum(self, version: PolicyVersion) -> str:
        """Of the weights that were published as `version`."""
        return self._checksums[version]

    def retire(self, used: Collection[PolicyVersion]) -> list[PolicyVersion]:
        """Forgets the policies that are too old to be asked for and that nobody uses, and returns them."""
        old = list(self._checksums)[: -self._keep]
        retired = [version for version in old if version not in used]
        for version in retired:
            del self._checksums[version]
        return retired

    def check(self, key: RequestKey) -> None:
        """Raises ValueError if the policy of a new request is not one that its kind may use."""
        allowed = list(islice(reversed(self._checksums), 2 if key.kind is RequestKind.EXPLORE else 1))
        if key.policy not in allowed:
            state = "an older one" if key.policy in self._checksums else "not known"
            names = " or ".join(map(str, allowed)) or "none yet"
            raise ValueError(f"{key.kind.name} needs a published policy ({names}); {key.policy} is {state}")
