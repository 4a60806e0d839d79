"""What an examination of a drafter finds."""

from dataclasses import dataclass, field


@dataclass
class Finding:
    """One check: `level` is "ok", "note" (worth knowing), "warning" (may cost acceptance) or "failure"."""

    check: str
    level: str
    message: str


@dataclass
class Examination:
    """All findings, and the accepted lengths measured by each route."""

    findings: list[Finding] = field(default_factory=list)
    accepted_lengths: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, check: str, level: str, message: str) -> None:
        self.findings.append(Finding(check, level, message))

    @property
    def failed(self) -> bool:
        return any(finding.level == "failure" for finding in self.findings)

    def levels(self) -> dict[str, str]:
        """The worst level of every check."""
        order = ("ok", "note", "warning", "failure")
        result: dict[str, str] = {}
        for finding in self.findings:
            result[finding.check] = max(result.get(finding.check, "ok"), finding.level, key=order.index)
        return result


__all__ = ["Examination", "Finding"]
