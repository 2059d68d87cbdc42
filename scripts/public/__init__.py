"""`tensorcache public`: prefixes that all tenants of a model share, such as its system prompt.

command     the verbs and their options
asking      an admin's command to one server, and its answer
"""

from scripts.public.command import add_parser

__all__ = ["add_parser"]
