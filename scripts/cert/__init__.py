"""`tensorcache cert`: certificates with which the nodes of a cluster know each other.

command    the verbs and their options
issuing    an authority, and what it signs
show       whose a certificate is, until when, and whether a node would take it
"""

from scripts.cert.command import add_parser

__all__ = ["add_parser"]
