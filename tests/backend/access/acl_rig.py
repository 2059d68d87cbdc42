"""acl files for tests: principals with keys whose credentials the test knows."""

import os

from backend.access import new_key


class AclText:
    """Builds the text of an acl file; `credentials` by key id."""

    def __init__(self):
        self.credentials = {}
        self._parts = []

    def principal(self, name, *lines, models='["*"]', keys=()):
        """`lines` are more keys of the table. Each of `keys` is an id, or an id and when it expires."""
        self._parts.append("\n".join([f'[principals."{name}"]', f"models = {models}", *lines, ""]))
        for key in keys:
            key_id, expires = key if isinstance(key, tuple) else (key, "")
            self.key(name, key_id, expires=expires)
        return self

    def key(self, name, key_id, *, expires=""):
        credential, entry = new_key(key_id)
        self.credentials[key_id] = credential
        lines = [f'[[principals."{name}".keys]]', f'id = "{key_id}"', f'sha256 = "{entry.sha256}"']
        self._parts.append("\n".join([*lines, f"expires = {expires}" if expires else "", ""]))
        return self

    def add(self, text):
        self._parts.append(text)
        return self

    def __str__(self):
        return "\n".join(self._parts)

    def write(self, path):
        """As an editor does that replaces the file."""
        scratch = path.with_name(f".{path.name}.new")
        scratch.write_text(str(self))
        scratch.chmod(0o600)
        os.replace(scratch, path)
        return path


def api_key(credential):
    return {"api_key": credential}
