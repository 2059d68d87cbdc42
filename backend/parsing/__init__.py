"""Requests read strictly: whatever a client sends becomes a Generation or one line of error. The face."""

from backend.parsing.limits import RequestLimits
from backend.parsing.prompt import read_prefix
from backend.parsing.request import PROBE, Hasher, parse_generation, read_deadline

__all__ = ["PROBE", "Hasher", "RequestLimits", "parse_generation", "read_deadline", "read_prefix"]
