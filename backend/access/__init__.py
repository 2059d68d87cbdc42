"""Who may do what: credentials become callers, callers have allowances.

contract       Verb, Caller, Authoriser, Audit, Allowances: what the rest of the backend sees
reason         why somebody was refused, for the audit line alone
keys           credentials, and what a file keeps of them
credential     takes the one credential out of a request
acl            principals and whose key is whose; acl_schema is the format of the file, acl_file reads it
acl_watch      follows the file; acl_access decides by it
allowances     counts what each principal uses, in token buckets (token_bucket)
audit          one line per refusal and per command
open_access    no access control: one namespace for everybody; awaited_acl until there is an acl file
"""

from backend.access.acl import Acl, Principal
from backend.access.acl_access import AclAccess, open_acl_access, probe_credential
from backend.access.acl_file import read_acl
from backend.access.acl_schema import parse_acl
from backend.access.allowances import CountedAllowances
from backend.access.audit import AUDIT_LOGGER, AuditLog
from backend.access.awaited_acl import AwaitedAcl, await_acl
from backend.access.contract import Access, Allowance, Allowances, Audit, Authoriser, Caller, Verb
from backend.access.keys import KeyEntry, new_key, split_credential
from backend.access.open_access import DEFAULT_NAMESPACE, EVERYBODY, NOBODY, NoLimits, OpenAccess, open_access
from backend.access.reason import Reason

__all__ = [
    "AUDIT_LOGGER",
    "DEFAULT_NAMESPACE",
    "EVERYBODY",
    "NOBODY",
    "Access",
    "Acl",
    "AclAccess",
    "Allowance",
    "Allowances",
    "Audit",
    "AuditLog",
    "Authoriser",
    "AwaitedAcl",
    "Caller",
    "CountedAllowances",
    "KeyEntry",
    "NoLimits",
    "OpenAccess",
    "Principal",
    "Reason",
    "Verb",
    "await_acl",
    "new_key",
    "open_access",
    "open_acl_access",
    "parse_acl",
    "probe_credential",
    "read_acl",
    "split_credential",
]
