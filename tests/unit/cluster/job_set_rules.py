"""Decisions of Kubernetes' Job controller and of the JobSet controller, from their rules.

The Job controller goes through the rules of `podFailurePolicy` for each failed pod in order; a
pod without a rule counts towards `backoffLimit`. The JobSet controller takes the first of its
rules that matches reason and message of the failed Job, and without one restarts the JobSet.
"""

from __future__ import annotations

import re
from typing import Any


def decide(spec: dict[str, Any], exit_codes: list[int], num_restarts: int = 0) -> str:
    """Return the JobSet's action after the pods have ended with these codes, in this order.

    Args:
        num_restarts: restarts so far that count towards the limit.

    Returns:
        complete, fail, restart, or free restart: one that is not counted.
    """
    (replicated,) = spec["replicatedJobs"]
    failure = _find_job_failure(replicated["template"]["spec"], exit_codes)
    if failure is None:
        return "complete"
    reason, message = failure
    action = "RestartJobSet"
    for rule in spec["failurePolicy"]["rules"]:
        reasons = rule.get("onJobFailureReasons", [])
        patterns = rule.get("onJobFailureMessagePatterns", [])
        if (not reasons or reason in reasons) and (
            not patterns or any(re.search(pattern, message) for pattern in patterns)
        ):
            action = rule["action"]
            break
    if action == "RestartJobSet":
        return "restart" if num_restarts < spec["failurePolicy"]["maxRestarts"] else "fail"
    return {"FailJobSet": "fail", "RestartJobSetAndIgnoreMaxRestarts": "free restart"}[action]


def _find_job_failure(job: dict[str, Any], exit_codes: list[int]) -> tuple[str, str] | None:
    """Return reason and message of the Job's failure; None if it is complete."""
    (container,) = job["template"]["spec"]["containers"]
    num_counted = 0
    for number, code in enumerate(exit_codes):
        if code == 0:
            continue
        for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
            test = rule["onExitCodes"]
            assert test["operator"] == "In"
            if test["containerName"] == container["name"] and code in test["values"]:
                assert rule["action"] == "FailJob"
                return "PodFailurePolicy", (
                    f"Container {container['name']} for pod default/pod-{number} failed with exit "
                    f"code {code} matching FailJob rule at index {index}"
                )
        num_counted += 1
    if num_counted > job["backoffLimit"]:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None
