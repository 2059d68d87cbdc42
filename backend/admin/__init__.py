"""What an admin may tell a running decoder: a request with the parameter `admin`, answered with JSON.

contract       Administrator: what the door of the backend hands such a request to
"""

from backend.admin.contract import ADMIN_PARAMETER, Administrator, NoCommands

__all__ = ["ADMIN_PARAMETER", "Administrator", "NoCommands"]
