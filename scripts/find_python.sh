#!/bin/sh
# Prints the newest Python that the serving environment can use, or says what to install.
#
# numpy 1.26 (Triton 2.51's Python stub has the numpy 1 ABI) has wheels for 3.11 and 3.12 and no later ones. A name on
# PATH proves nothing (version managers leave names that do not run), so each candidate is run.
for candidate in "$@" python3 python python3.12 python3.11; do
    found=$("$candidate" -c 'import sys; print(sys.executable if sys.version_info[:2] in ((3, 11), (3, 12)) else "")' 2>/dev/null)
    if [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
done
echo "No Python 3.11 or 3.12 found (numpy 1.26, which Triton's Python stub needs, has no wheels for later ones)." >&2
echo "Install one, for example: sudo apt-get install python3.12 python3.12-venv libpython3.12" >&2
echo "or name one: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
