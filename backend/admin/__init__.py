"""What an admin may tell a running decoder: a request with the parameter `admin`, answered with JSON.

contract          Administrator: what the door of the backend hands such a request to
desk              the commands there are
public_prefixes   what is public for one model, in a folder that all processes of the node follow
prefix_file       one of those prefixes, on disk
"""

from backend.admin.contract import ADMIN_PARAMETER, Administrator, NoCommands
from backend.admin.desk import AdminDesk
from backend.admin.public_prefixes import PublicPrefixes

__all__ = ["ADMIN_PARAMETER", "AdminDesk", "Administrator", "NoCommands", "PublicPrefixes"]
