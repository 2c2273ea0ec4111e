"""Verifiers: from a completion and its problem record to a reward, on the host, without jax.

`VerifierPool` is the way in: it grades in worker processes, in order, under deadlines.
docs/verifiers.md has the rules of every verifier and the meaning of every status.
"""

from __future__ import annotations

from fadejax.verify.graders import VERIFIERS, check_known, check_name, check_problem
from fadejax.verify.pool import VerifierPool, grade
from fadejax.verify.verdict import STATUSES, ProblemError, Verdict, check_count

__all__ = [
  "STATUSES",
  "VERIFIERS",
  "ProblemError",
  "Verdict",
  "VerifierPool",
  "check_count",
  "check_known",
  "check_name",
  "check_problem",
  "grade",
]
