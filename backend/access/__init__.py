"""Who may do what: credentials become callers, callers have allowances.

contract       Verb, Caller, Authoriser, Audit, Allowances: what the rest of the backend sees
audit          one line per refusal and per command
open_access    no access control: one namespace for everybody
"""

from backend.access.audit import AUDIT_LOGGER, AuditLog
from backend.access.contract import Access, Allowance, Allowances, Audit, Authoriser, Caller, Verb
from backend.access.open_access import DEFAULT_NAMESPACE, EVERYBODY, NOBODY, NoLimits, OpenAccess, open_access

__all__ = [
    "AUDIT_LOGGER",
    "DEFAULT_NAMESPACE",
    "EVERYBODY",
    "NOBODY",
    "Access",
    "Allowance",
    "Allowances",
    "Audit",
    "AuditLog",
    "Authoriser",
    "Caller",
    "NoLimits",
    "OpenAccess",
    "Verb",
    "open_access",
]
