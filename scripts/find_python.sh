#!/bin/sh
# Prints the first Python that the serving environment can use, or says what to install. Usage: find_python.sh [PYTHON…]
#
# Triton 2.51's Python stub has the numpy 1 ABI. numpy 1.26 has wheels for 3.11 and 3.12; on 3.13 it can be built, but
# pip refuses it there: ml-dtypes, which onnxruntime brings, wants numpy 2.1 from 3.13 on. A name on PATH proves nothing
# (version managers leave names that do not run), so each candidate is run.
later=""
for candidate in "$@" python3 python python3.12 python3.11; do
    found=$("$candidate" -c 'import sys; print(*sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
    case $found in
        "3 11 "* | "3 12 "*)
            echo "${found#3 1? }"
            exit 0
            ;;
        "3 "*) later="$later $candidate" ;;
    esac
done
echo "No Python 3.11 or 3.12 found${later:+ (only other versions:$later)}." >&2
echo "Triton's Python stub needs numpy 1.26, which pip cannot install beside onnxruntime on Python 3.13 and later." >&2
echo "Install one, for example: sudo apt-get install python3.12 python3.12-venv libpython3.12" >&2
echo "or name one: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
